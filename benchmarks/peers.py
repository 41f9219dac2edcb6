"""Tokens per second of jaxspec and of transformers on the bundled weights, float32, batch 1, in one run.

    uv run --group dev python benchmarks/peers.py

All decode the same prompt greedily to the same tokens, which is checked, and take turns; figures are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from jaxspec import LLM, SamplingParams
from jaxspec.engine import bundled_checkpoint

PROMPT, NEW_TOKENS, TURNS = "def fibonacci(n):", 128, 7


def with_jaxspec(num_drafts: int) -> Callable[[], list[int]]:
    """A function that decodes with K drafts."""
    # Every turn decodes the same prompt, and is to do so from the start.
    llm = LLM(
        speculative_config={"num_speculative_tokens": num_drafts},
        max_model_len=512,
        max_num_seqs=1,
        engine_config={"enable_prefix_caching": False},
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return lambda: llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids


def with_transformers() -> Callable[[], list[int]]:
    """A function that decodes with transformers' generate, plain greedy."""
    model = AutoModelForCausalLM.from_pretrained(bundled_checkpoint(), dtype=torch.float32).eval()
    ids = torch.tensor([LLM(max_num_seqs=1).tokenizer.encode(PROMPT)])
    limits = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}

    def decode() -> list[int]:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **limits)
        return out[0, ids.shape[1] :].tolist()

    return decode


def main() -> None:
    """Prints a table."""
    runs = {"transformers": with_transformers(), "jaxspec, K = 0": with_jaxspec(0), "jaxspec, K = 3": with_jaxspec(3)}
    outputs = {name: run() for name, run in runs.items()}
    assert len({tuple(tokens) for tokens in outputs.values()}) == 1, "the outputs differ"
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            speeds[name].append(NEW_TOKENS / (time.perf_counter() - started))
    print("| | tokens/s | ratio |\n|---|---|---|")
    for name, measured in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(measured, speeds["transformers"], strict=True))
        print(f"| {name} | {statistics.median(measured):.0f} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
