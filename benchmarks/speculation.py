"""Tokens per second and acceptance of the bundled checkpoint for K = 0..5 drafts, as ratios to K = 0 in one run.

    uv run python benchmarks/speculation.py [--update-readme]

Every number of drafts decodes the same prompts greedily to the same tokens, which is checked. The Ks take turns, so
that whatever else the machine does meets them all alike; figures are medians over the turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import readme

from jaxspec import LLM, SamplingParams

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting's medians."""

    batch: int
    num_drafts: int
    tokens_per_second: float
    ratio: float
    mean_acceptance_length: float
    acceptance: list[float]


def measure(batch: int, most_drafts: int, max_tokens: int, turns: int) -> list[Row]:
    """Decodes `batch` prompts with every number of drafts, in turns."""
    prompts = (HERE / "prompts.txt").read_text().splitlines()[:batch]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    llms = [_engine(drafts, batch) for drafts in range(most_drafts + 1)]
    expected = [out.outputs[0].token_ids for out in llms[0].generate(prompts, params, use_tqdm=False)]
    speeds: list[list[float]] = [[] for _ in llms]
    for turn in range(turns + 1):
        for drafts, llm in enumerate(llms):
            llm.reset_metrics()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [out.outputs[0].token_ids for out in outputs] == expected, f"K = {drafts} changed the output"
            if turn:  # the first compiles
                speeds[drafts].append(llm.get_metrics().tokens_per_second)
    rows = []
    for drafts, llm in enumerate(llms):
        metrics, speed = llm.get_metrics(), statistics.median(speeds[drafts])
        ratio = statistics.median(a / b for a, b in zip(speeds[drafts], speeds[0], strict=True))
        rates = metrics.acceptance_rate_per_position
        rows.append(Row(batch, drafts, speed, ratio, metrics.mean_acceptance_length, rates))
    return rows


def _engine(num_drafts: int, batch: int) -> LLM:
    # Every turn decodes the same prompts, and is to do so from the start.
    options = {"enable_prefix_caching": False, "rounds_per_dispatch": 4}
    return LLM(
        speculative_config={"num_speculative_tokens": num_drafts},
        max_model_len=512,
        max_num_seqs=batch,
        engine_config=options,
    )


def as_table(rows: list[Row]) -> str:
    """Markdown: a line for each K, a column for each batch."""
    batches = sorted({row.batch for row in rows})
    at = {(row.num_drafts, row.batch): row for row in rows}
    heads = "".join(f" batch {batch}: tokens/s | ratio |" for batch in batches)
    lines = [f"| K |{heads} tokens per verification |", "|---|" + "---|---|" * len(batches) + "---|"]
    for drafts in sorted({row.num_drafts for row in rows}):
        cells = "".join(f" {at[drafts, b].tokens_per_second:.0f} | {at[drafts, b].ratio:.2f} |" for b in batches)
        lines.append(f"| {drafts} |{cells} {at[drafts, batches[-1]].mean_acceptance_length:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--most-drafts", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--update-readme", action="store_true", help="put the table into the README")
    args = parser.parse_args()
    rows = [row for b in args.batches for row in measure(b, args.most_drafts, args.max_tokens, args.turns)]
    table = as_table(rows)
    setting = f"{args.max_tokens} greedy tokens a prompt, medians of {args.turns} turns; {readme.machine()}."
    print(table, setting, sep="\n")
    result = {"setting": setting, "rows": [dataclasses.asdict(row) for row in rows]}
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "speculation.json").write_text(json.dumps(result, indent=1) + "\n")
    if args.update_readme:
        readme.update("speculation", f"{table}\n{setting}\n")


if __name__ == "__main__":
    main()
