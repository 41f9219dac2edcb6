"""The engine on the bundled checkpoint: overlap, waves, the prefix cache, context, and what slack costs.

    uv run python benchmarks/engine.py [--update-readme]

All figures are ratios within this run. What is compared takes turns, so that whatever else the machine does meets all
alike, and gives the same tokens, which is checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import readme

from jaxspec import LLM, SamplingParams, SpeculativeConfig, load
from jaxspec.cache import capacity as ledger_ops
from jaxspec.engine import Engine, EngineConfig, bundled_checkpoint
from jaxspec.engine.requests import Request

HERE = Path(__file__).parent
SPEC = {"num_speculative_tokens": 3}
ROWS = 16


def make(**options: object) -> LLM:
    """An LLM of 16 rows, warm."""
    llm = LLM(speculative_config=SPEC, max_model_len=512, max_num_seqs=ROWS, engine_config=options)
    llm.warmup()
    return llm


def in_turns(ways: dict[str, Callable[[], list]], turns: int) -> dict[str, list[float]]:
    """Seconds of every way in every turn. All must return the same."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    expected = None
    for turn in range(turns + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            found = way()
            took = time.perf_counter() - started
            expected = found if expected is None else expected
            assert found == expected, f"{name} gave other tokens"
            if turn:  # the first warms up
                seconds[name].append(took)
    return seconds


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Median over the turns."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def heavy_tailed(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and outputs with Pareto-distributed lengths."""
    rng = np.random.default_rng(0)
    sizes = np.minimum(8 + rng.pareto(1.1, (count, 2)) * 16, 250).astype(int)
    prompts = [rng.integers(1, 2048, size).tolist() for size in sizes[:, 0]]
    return prompts, [SamplingParams(temperature=0.0, max_tokens=int(n), ignore_eos=True) for n in sizes[:, 1]]


def throughput(turns: int, count: int) -> dict[str, float]:
    """One load with overlap, without, and in waves of as many requests as there are rows."""
    prompts, params = heavy_tailed(count)
    options = {"enable_prefix_caching": False}
    overlapped, synchronous = make(overlap=1, **options), make(overlap=0, **options)

    def whole(llm: LLM) -> list:
        llm.reset_metrics()
        return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]

    def waves() -> list:
        found = []
        for first in range(0, count, ROWS):
            part = slice(first, first + ROWS)
            outputs = overlapped.generate(prompts[part], params[part], use_tqdm=False)
            found += [out.outputs[0].token_ids for out in outputs]
        return found

    ways = {"overlap": lambda: whole(overlapped), "no overlap": lambda: whole(synchronous), "waves": waves}
    seconds = in_turns(ways, turns)
    return {
        "overlap_over_synchronous": ratio(seconds["no overlap"], seconds["overlap"]),
        "overlap_over_waves": ratio(seconds["waves"], seconds["overlap"]),
    }


def host_gap(turns: int) -> dict[str, float]:
    """Share of the time that the device waits for the host while 16 rows decode."""
    prompts = (HERE / "prompts.txt").read_text().splitlines()[:ROWS]
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    shares: dict[int, list[float]] = {0: [], 1: []}
    llms = {overlap: make(overlap=overlap, enable_prefix_caching=False) for overlap in shares}
    for turn in range(turns + 1):
        for overlap, llm in llms.items():
            llm.reset_metrics()
            llm.generate(prompts, params, use_tqdm=False)
            metrics = llm.get_metrics()
            if turn:
                shares[overlap].append(metrics.seconds_idle / metrics.seconds_decode)
    return {f"host_gap_overlap_{overlap}": statistics.median(found) for overlap, found in shares.items()}


def prefix_cache(turns: int) -> dict[str, float]:
    """A prompt, then 15 more that share its first 384 tokens, and a few tokens of output each."""
    rng = np.random.default_rng(1)
    stem = rng.integers(1, 2048, 384).tolist()
    prompts = [[*stem, *rng.integers(1, 2048, 8).tolist()] for _ in range(ROWS)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llms = {name: make(enable_prefix_caching=name == "cached") for name in ("cached", "not")}

    def run(llm: LLM) -> list:
        llm.reset_prefix_cache()
        outputs = [llm.generate(part, params, use_tqdm=False) for part in (prompts[:1], prompts[1:])]
        return [out.outputs[0].token_ids for part in outputs for out in part]

    seconds = in_turns({name: lambda llm=llm: run(llm) for name, llm in llms.items()}, turns)
    return {"prefix_cache_speedup": ratio(seconds["not"], seconds["cached"])}


class Decoding:
    """Rows that decode, step by step, in an engine whose model takes any length."""

    def __init__(self, max_model_len: int, num_rows: int, prompt_len: int, page_size: int, **options: object) -> None:
        config, params = load(bundled_checkpoint(), jnp.float32, widen=False)
        config = dataclasses.replace(config, max_position_embeddings=max_model_len)
        sizes = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=num_rows,
            page_size=page_size,
            overlap=0,
            rounds_per_dispatch=1,
            **options,
        )
        self.engine = Engine(params, config, SpeculativeConfig(**SPEC), sizes, jnp.float32)
        sampling = SamplingParams(temperature=0.0)
        rng = np.random.default_rng(2)
        for row in range(num_rows):
            prompt = tuple(rng.integers(1, 2048, prompt_len).tolist())
            more = min(max_model_len - prompt_len, 1024)
            self.engine.add_request(row, Request(None, prompt, sampling, (), more), 0)
        while not all(live.decoding for live in self.engine._known.values()):
            self.engine.step()

    def seconds(self, steps: int) -> float:
        """Median time of a step."""
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - started)
        return statistics.median(times)


def context_cost(turns: int) -> dict[str, float]:
    """A step of 4 rows at a context of some 512 tokens, where 32k may come and where 1k may."""
    options = {"num_rows": 4, "prompt_len": 448, "page_size": 16, "num_pages": 2053}
    long, short = Decoding(32_768, **options), Decoding(1_024, **options)
    long.seconds(3), short.seconds(3)
    pairs = [(long.seconds(5), short.seconds(5)) for _ in range(turns)]
    return {"step_32k_over_1k": statistics.median(a / b for a, b in pairs)}


def slack_overhead() -> dict[str, float]:
    """Pages that a row holds during a round only because of slack, over 1,024 tokens in pages of 64."""
    decoding = Decoding(1_536, num_rows=4, prompt_len=256, page_size=64)
    engine, extra, held = decoding.engine, [], []
    grant = jax.jit(ledger_ops.grant, static_argnames="num_drafts")
    num_drafts = SPEC["num_speculative_tokens"]
    while engine.has_unfinished_requests and len(engine._rows) == 4:
        state = engine._device.serving.state
        (_, table), _ = grant((state.capacity, state.table), state.running, num_drafts=num_drafts)
        without = table.pages_for(state.kv_len + 1 + num_drafts)
        extra.append(float(jnp.mean(table.num_pages - without)))
        held.append(float(jnp.mean(without)))
        engine.step()
    pool = engine._device.num_pages - 1
    return {
        "slack_extra_pages_per_row": statistics.fmean(extra),
        "slack_share_of_pool": 4 * statistics.fmean(extra) / pool,
        "slack_share_of_pages_held": statistics.fmean(extra) / statistics.fmean(held),
    }


def as_table(found: dict[str, float]) -> str:
    """Markdown."""
    lines = [
        "| K = 3, 16 rows unless said | |",
        "|---|---|",
        f"| requests of heavy-tailed lengths: throughput with overlap, to without | "
        f"{found['overlap_over_synchronous']:.2f} |",
        f"| the same, to waves of 16 requests | {found['overlap_over_waves']:.2f} |",
        f"| device waiting for the host: with overlap, without (at most) | {found['host_gap_overlap_1']:.1%}, "
        f"{found['host_gap_overlap_0']:.1%} |",
        f"| a prompt of 392 tokens, then 15 that share 384 of them: throughput with the prefix cache, to without | "
        f"{found['prefix_cache_speedup']:.2f} |",
        f"| a step of 4 rows at context 512: `max_model_len` 32k, to 1k (time) | {found['step_32k_over_1k']:.2f} |",
        f"| pages held for slack over 1,024 tokens, of 64 tokens each | "
        f"{found['slack_extra_pages_per_row']:.3f} a row, {found['slack_share_of_pages_held']:.2%} of those held |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--update-readme", action="store_true", help="put the table into the README")
    args = parser.parse_args()
    found = throughput(args.turns, args.requests) | host_gap(args.turns) | prefix_cache(args.turns)
    found |= context_cost(args.turns) | slack_overhead()
    setting = f"Medians of {args.turns} turns; {readme.machine()}."
    table = as_table(found)
    print(table, setting, sep="\n")
    (HERE / "results" / "engine.json").write_text(json.dumps({"setting": setting} | found, indent=1) + "\n")
    if args.update_readme:
        readme.update("engine", f"{table}\n{setting}\n")


if __name__ == "__main__":
    main()
