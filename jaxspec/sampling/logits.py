"""The one chain from logits to the distribution p that is sampled from, for targets and drafters alike."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxspec.sampling.params import SamplingState

Gaps = Float32[Array, "b t v"]


def log_probs(logits: Float[Array, "b t v"], sampling: SamplingState) -> Float32[Array, "b t v"]:
    """Log probabilities of the next token: temperature, min_p, top_k, top_p, normalised; in float32.

    The order is vLLM's. Filters keep every token that ties with the last one kept, and always the most likely.
    Excluded tokens are exactly -inf. Greedy rows are exactly one-hot: 0 at the argmax (the first on ties).
    A row with non-finite logits has unspecified values; the other rows are not affected.
    """
    return jax.lax.cond(jnp.all(sampling.is_greedy), _greedy_log_probs, _sampled_log_probs, logits, sampling)


def argmax(x: Float[Array, "*b v"]) -> Int32[Array, "*b"]:
    """Index of the largest value, the first on ties; a valid index even for a row with NaN.

    Two plain reductions: XLA's argmax is one reduction over pairs, 15 times slower on the CPU.
    """
    top = jnp.max(x, axis=-1, keepdims=True)
    last = x.shape[-1] - 1
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.min(jnp.where(x == top, index, last), axis=-1)


def _greedy_log_probs(logits: Float[Array, "b t v"], sampling: SamplingState) -> Float32[Array, "b t v"]:
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    return jnp.where(index == argmax(logits)[:, :, None], jnp.float32(0), -jnp.inf)


def _sampled_log_probs(logits: Float[Array, "b t v"], sampling: SamplingState) -> Float32[Array, "b t v"]:
    """The chain in terms of gaps: how far a logit lies below the largest, in units of the temperature.

    The largest logit is subtracted first and then has a gap of exactly 0, so neither the division nor the
    exponential can overflow, whatever the temperature (field cases i10 and c3).
    """
    greedy = sampling.is_greedy
    logits = logits.astype(jnp.float32)
    # Greedy rows divide by zero here and hold nonsense until the last line replaces them.
    gaps = (jnp.max(logits, axis=-1, keepdims=True) - logits) / sampling.temperature[:, None, None]
    gaps = jnp.where(gaps <= -jnp.log(sampling.min_p)[:, None, None], gaps, jnp.inf)
    uses_top_k = jnp.any((sampling.top_k > 0) & ~greedy)
    gaps = jax.lax.cond(uses_top_k, _keep_top_k, _keep_all, gaps, sampling)
    uses_top_p = jnp.any((sampling.top_p < 1) & ~greedy)
    gaps = jax.lax.cond(uses_top_p, _keep_top_p, _keep_all, gaps, sampling)
    log_p = -gaps - jnp.log(jnp.sum(jnp.exp(-gaps), axis=-1, keepdims=True))
    return jnp.where(greedy[:, None, None], _greedy_log_probs(logits, sampling), log_p)


def _keep_all(gaps: Gaps, sampling: SamplingState) -> Gaps:
    return gaps


def _keep_top_k(gaps: Gaps, sampling: SamplingState) -> Gaps:
    vocab = gaps.shape[-1]
    k = jnp.where((sampling.top_k > 0) & (sampling.top_k < vocab), sampling.top_k, vocab)[:, None]
    return _keep_smallest(gaps, lambda kept: jnp.sum(kept, axis=-1, dtype=jnp.int32) >= k)


def _keep_top_p(gaps: Gaps, sampling: SamplingState) -> Gaps:
    weights = jnp.exp(-gaps)
    needed = sampling.top_p[:, None] * jnp.sum(weights, axis=-1)
    # Below 1 in the last place, a sum could reach the total before its smallest terms: 1 must keep everything.
    keep_all = (sampling.top_p >= 1)[:, None]
    return _keep_smallest(gaps, lambda kept: ~keep_all & (jnp.sum(jnp.where(kept, weights, 0), axis=-1) >= needed))


def _keep_smallest(gaps: Gaps, enough: Callable[[Bool[Array, "b t v"]], Bool[Array, "b t"]]) -> Gaps:
    """Keeps the gaps up to the smallest bound at which `enough` of them are kept; all if it is never enough.

    The bound is found bit by bit: floats that are not negative order like their bits read as integers. 31
    reductions are exact, 20 times faster than a sort on the CPU, and stay local when the vocabulary is sharded.
    """
    bits = jax.lax.bitcast_convert_type(gaps, jnp.int32)

    def refine(step: Int32[Array, ""], bound: Int32[Array, "b t"]) -> Int32[Array, "b t"]:
        trial = bound | (1 << (30 - step))
        return jnp.where(enough(bits < trial[:, :, None]), bound, trial)

    bound = jax.lax.fori_loop(0, 31, refine, jnp.zeros(gaps.shape[:2], jnp.int32))
    return jnp.where(bits <= bound[:, :, None], gaps, jnp.inf)
