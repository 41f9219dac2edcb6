"""Measures the bundled checkpoint on the held-out files and renders its card anew.

    uv run --group train python checkpoints/evaluate.py

Bits per byte come from the cache-free twin, acceptance from the engine. Acceptance alone proves nothing, for a
model that loops is easy to draft for: the share of repeated 8-grams stands beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from card import render_card
from corpus import END_OF_TEXT, encode, read_corpus
from jaxtyping import Array, Bool, Float, Int
from tokenizers import Tokenizer

from jaxspec import LLM, RequestOutput, SamplingParams, dense_forward, load

CONTEXT = 256
BATCH = 8
NGRAM = 8
PROMPT_TOKENS = 64
NEW_TOKENS = 96
LEAST_REPETITIVE = 12


@dataclasses.dataclass(frozen=True)
class Windows:
    """Pieces of the held-out files and which of their positions count: every token counts exactly once."""

    tokens: Int[np.ndarray, "n context+2"]
    counted: Bool[np.ndarray, "n context"]
    counted_mtp: Bool[np.ndarray, "n context"]


def cut(files: Sequence[Int[np.ndarray, "_"]], end: int) -> Windows:
    """Windows that overlap by half, so that a token is predicted from at least half a context where it exists."""
    width, stride, pieces = CONTEXT + 2, CONTEXT // 2, []
    for file in files:
        text = np.concatenate([[end], file])
        for start in range(0, max(1, len(text) - stride - 1), stride):
            piece = np.full(width, end, np.int32)
            known = text[start : start + width]
            piece[: len(known)] = known
            position = np.arange(CONTEXT)
            fresh = (position >= stride) | (start == 0)
            pieces.append((piece, fresh & (position + 1 < len(known)), fresh & (position + 2 < len(known))))
    return Windows(*(np.stack(column) for column in zip(*pieces, strict=True)))


def cross_entropies(path: Path, windows: Windows) -> tuple[float, float]:
    """Mean nats per token of the model's head and of its MTP module."""
    config, params = load(path, jnp.float32)

    @jax.jit
    def sums(tokens: Int[Array, "b w"], counted: Array, counted_mtp: Array) -> Float[Array, "2"]:
        out = dense_forward(params, config, tokens)
        nll = optax.softmax_cross_entropy_with_integer_labels
        main = nll(out.logits[:, :CONTEXT], tokens[:, 1 : CONTEXT + 1])
        mtp = nll(out.mtp_logits[0, :, :CONTEXT], tokens[:, 2 : CONTEXT + 2])
        return jnp.stack([jnp.sum(main * counted), jnp.sum(mtp * counted_mtp)])

    padding = -len(windows.tokens) % BATCH
    columns = [np.pad(x, ((0, padding), (0, 0))) for x in dataclasses.astuple(windows)]
    batches = zip(*(np.split(x, len(x) // BATCH) for x in columns), strict=True)
    main, mtp = sum(np.asarray(sums(*batch), np.float64) for batch in batches)
    return main / windows.counted.sum(), mtp / windows.counted_mtp.sum()


def repeated_ngrams(ids: Sequence[int]) -> float:
    """Share of n-grams that occurred before in the same output."""
    ngrams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams)


def accept(path: Path, prompts: Sequence[Sequence[int]], drafts: int, temperature: float) -> dict:
    """Acceptance over all prompts, and over those whose output repeats itself least."""
    speculation = {"method": "mtp", "num_speculative_tokens": drafts}
    length = PROMPT_TOKENS + NEW_TOKENS
    llm = LLM(path, speculative_config=speculation, max_model_len=length, max_num_seqs=16, seed=0)
    outputs = llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, ignore_eos=True))
    outputs = sorted(outputs, key=lambda out: repeated_ngrams(out.outputs[0].token_ids))
    return {
        "temperature": temperature,
        "num_speculative_tokens": drafts,
        "all": summarise(outputs),
        "least_repetitive": summarise(outputs[:LEAST_REPETITIVE]),
    }


def summarise(outputs: Sequence[RequestOutput]) -> dict:
    """Counts and rates of several requests together."""
    metrics = sum((out.metrics for out in outputs[1:]), outputs[0].metrics)
    return {
        "num_prompts": len(outputs),
        "num_drafts": metrics.num_drafts,
        "mean_acceptance_length": round(metrics.mean_acceptance_length, 3),
        "acceptance_rate_per_position": [round(rate, 3) for rate in metrics.acceptance_rate_per_position],
        "repeated_8grams": round(float(np.mean([repeated_ngrams(o.outputs[0].token_ids) for o in outputs])), 3),
    }


def main() -> None:
    """Evaluates a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "stdlib-9m")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--loss-only", action="store_true", help="leave acceptance out")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    texts = read_corpus().held_out
    files = [encode(tokenizer, [text]).astype(np.int32) for text in texts.values()]
    main_nats, mtp_nats = cross_entropies(args.model, cut(files, tokenizer.token_to_id(END_OF_TEXT)))
    num_bytes, num_tokens = sum(len(text.encode()) for text in texts.values()), sum(map(len, files))
    result = {
        "held_out_files": sorted(texts),
        "held_out_bytes": num_bytes,
        "held_out_tokens": num_tokens,
        "context": CONTEXT,
        "nats_per_token": round(main_nats, 4),
        "mtp_nats_per_token": round(mtp_nats, 4),
        "bits_per_byte": round(main_nats * num_tokens / num_bytes / np.log(2), 4),
    }
    if not args.loss_only:
        stream = np.concatenate(files)
        starts = np.linspace(0, len(stream) - PROMPT_TOKENS, args.prompts, dtype=int)
        prompts = [stream[i : i + PROMPT_TOKENS].tolist() for i in starts]
        settings = [(drafts, temperature) for temperature in (0.0, 0.8) for drafts in (1, 2, 3)]
        result["prompt_tokens"], result["new_tokens"] = PROMPT_TOKENS, NEW_TOKENS
        result["acceptance"] = [accept(args.model, prompts, *setting) for setting in settings]
    (args.model / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    render_card(args.model)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
    main()
