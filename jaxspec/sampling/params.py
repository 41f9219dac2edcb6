"""Sampling parameters: what a request asks for, and the arrays a batch of requests becomes."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence

import jax
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, UInt32

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy, as in vLLM (`_SAMPLING_EPS`)."""

_INT32_MAX = 2**31 - 1
_SEED_MAX = 2**63 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. Names, defaults and meaning are vLLM's, but for `num_speculative_tokens`.

    Attributes:
        temperature: divides the logits; below 1e-5 the request is greedy and the filters have no effect.
        top_p: keep the fewest most likely tokens that hold this much probability; 1 keeps all.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this likely relative to the most likely one; 0 keeps all.
        seed: makes the output a function of model, prompt and seed; None lets the engine draw one.
        max_tokens: most tokens to generate; None means as many as the model's length allows.
        stop_token_ids: tokens that end the output (and are part of it), besides the model's own.
        ignore_eos: go on after the model's own end tokens; `stop_token_ids` still stop.
        num_speculative_tokens: most drafts a round of this request; 0 opts out; None: as many as the engine drafts.

    Raises:
        ValueError: an option out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            _require(_is_number(getattr(self, name)), f"{name} to be a number", getattr(self, name))
        finite = 0 <= self.temperature <= _FLOAT32_MAX
        _require(finite, "temperature to be a finite float32 >= 0", self.temperature)
        _require(0 < self.top_p <= 1, "top_p in (0, 1]", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p in [0, 1]", self.min_p)
        _require_int("top_k", self.top_k, -1, _INT32_MAX)
        if self.seed is not None:
            _require_int("seed", self.seed, 0, _SEED_MAX)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 1, _INT32_MAX)
        if self.num_speculative_tokens is not None:
            _require_int("num_speculative_tokens", self.num_speculative_tokens, 0, 64)
        if self.stop_token_ids is None:
            object.__setattr__(self, "stop_token_ids", ())
        is_list = isinstance(self.stop_token_ids, (list, tuple))
        _require(is_list, "stop_token_ids to be a list or tuple", self.stop_token_ids)
        for token in self.stop_token_ids:
            _require_int("every stop token id", token, 0, _INT32_MAX)
        _require(isinstance(self.ignore_eos, bool), "ignore_eos to be a bool", self.ignore_eos)
        # A tuple, so that the instance is immutable and hashable throughout.
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


@struct.dataclass
class SamplingState:
    """The sampling parameters of B rows as arrays.

    Attributes:
        temperature: below 1e-5 means greedy; padding rows may hold any such value.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
        seed: the 64-bit seed as two words, the high one first: Threefry's key.
        stop_ids: tokens that end the row's output, padded with -1, which equals no token.
        max_drafts: most drafts a round; a bound beyond any K where the request sets none.
    """

    temperature: Float32[Array, "b"]
    top_k: Int32[Array, "b"]
    top_p: Float32[Array, "b"]
    min_p: Float32[Array, "b"]
    seed: UInt32[Array, "b 2"]
    stop_ids: Int32[Array, "b n"]
    max_drafts: Int32[Array, "b"]

    @property
    def is_greedy(self) -> Bool[Array, "b"]:
        """Rows that take the most likely token. The one definition of greedy in this library."""
        return self.temperature < GREEDY_TEMPERATURE

    @classmethod
    def stack(cls, rows: Sequence[tuple[SamplingParams, int, tuple[int, ...]]], num_stop_ids: int) -> SamplingState:
        """Builds the arrays on the host and places them with one explicit transfer.

        Args:
            rows: per row its parameters, the seed in effect and all token ids that stop it.
            num_stop_ids: width of `stop_ids`, the same for every batch so that shapes are.

        Raises:
            ValueError: a seed out of range, or a row with more stop ids than `num_stop_ids`.
        """
        stop_ids = np.full((len(rows), num_stop_ids), -1, np.int32)
        for row, (_, seed, stops) in zip(stop_ids, rows, strict=True):
            _require_int("seed", seed, 0, _SEED_MAX)
            _require(len(stops) <= num_stop_ids, f"at most {num_stop_ids} stop token ids", len(stops))
            row[: len(stops)] = stops
        seeds = [(seed >> 32, seed & 0xFFFFFFFF) for _, seed, _ in rows]
        params = [row[0] for row in rows]
        wanted = [p.num_speculative_tokens for p in params]
        arrays = {
            "temperature": np.array([p.temperature for p in params], np.float32),
            "top_k": np.array([max(p.top_k, 0) for p in params], np.int32),
            "top_p": np.array([p.top_p for p in params], np.float32),
            "min_p": np.array([p.min_p for p in params], np.float32),
            "seed": np.array(seeds, np.uint32).reshape(len(rows), 2),
            "stop_ids": stop_ids,
            "max_drafts": np.array([_INT32_MAX if k is None else k for k in wanted], np.int32),
        }
        return cls(**jax.device_put(arrays))


def _require(condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"expected {expected}, got {got!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def _require_int(name: str, value: object, low: int, high: int) -> None:
    # A bool is an int to Python, but True is never meant as the number 1 here.
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    _require(is_int and low <= value <= high, f"{name} to be an integer in {low}..{high}", value)
