"""XLA implementation: works everywhere, and its cost follows the context in use, not the table's width."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.fp8 import dequantize
from pallas_kernels.paged_mla.splits import first_seen

BLOCK_TOKENS = 128  # cache positions read per trip of the loop


def paged_mla_reference(
    q_latent: Float[Array, "b t h c"],
    q_rope: Float[Array, "b t h r"],
    latent_pool: Float[Array, "n p s c"],
    rope_pool: Float[Array, "n p s r"],
    layer: Int[Array, ""],
    page_ids: Int[Array, "b m"],
    start: Int[Array, "b"],
    length: Int[Array, "b"],
    scale: float,
    first: int = 0,
    *,
    scale_pool: Float[Array, "n p g s"] | None = None,
    tree_mask: UInt32[Array, "b t 2"] | None = None,
    sliding_window: int | None = None,
) -> Float[Array, "b t h c"]:
    """Streams blocks of pages through a running softmax (arXiv:2112.05682), in float32.

    The loop goes over the blocks that some row of the batch sees.
    """
    batch, num_queries, heads, width = q_latent.shape
    page_size = latent_pool.shape[2]
    pages = max(1, min(BLOCK_TOKENS // page_size, page_ids.shape[1]))
    page_ids = jnp.pad(page_ids, ((0, 0), (0, -page_ids.shape[1] % pages)))
    block_tokens = pages * page_size

    def visit(block: Array, softmax: tuple) -> tuple:
        ids = lax.dynamic_slice_in_dim(page_ids, block * pages, pages, axis=1)
        latent = latent_pool[layer, ids]
        if scale_pool is not None:
            latent = dequantize(latent, scale_pool[layer, ids].swapaxes(-1, -2)).astype(q_latent.dtype)
        latent = latent.reshape(batch, block_tokens, width)
        rope = rope_pool[layer, ids].reshape(batch, block_tokens, -1)
        positions = block * block_tokens + jnp.arange(block_tokens)
        seen = _seen(positions, num_queries, start, length, first, tree_mask, sliding_window)
        # A slot nobody sees may hold anything: 0 * NaN would still be NaN.
        latent = jnp.where(jnp.any(seen, axis=1)[..., None], latent, 0)
        scores = jnp.einsum("bthc,bsc->bths", q_latent, latent, preferred_element_type=jnp.float32)
        scores += jnp.einsum("bthr,bsr->bths", q_rope, rope, preferred_element_type=jnp.float32)
        return _accumulate(softmax, jnp.where(seen[:, :, None], scores * scale, -jnp.inf), latent)

    shape = (batch, num_queries, heads)
    softmax = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, width)))
    low = jnp.where(length > 0, first_seen(start, first, sliding_window), 2**30)
    end = jnp.where(length > 0, start + length, 0)
    blocks = jnp.min(low) // block_tokens, (jnp.max(end) + block_tokens - 1) // block_tokens
    _, total, weighted = lax.fori_loop(*blocks, visit, softmax)
    return (weighted / jnp.where(total > 0, total, 1)[..., None]).astype(q_latent.dtype)


def _seen(
    positions: Int[Array, "s"],
    num_queries: int,
    start: Int[Array, "b"],
    length: Int[Array, "b"],
    first: int,
    tree_mask: UInt32[Array, "b t 2"] | None,
    sliding_window: int | None,
) -> Bool[Array, "b t s"]:
    """Which positions each query sees."""
    at, start, length = positions[None, None], start[:, None, None], length[:, None, None]
    inside = (at < start + length) & (length > 0)
    if tree_mask is None:
        query = start + jnp.arange(num_queries)[None, :, None]
        return inside & (at <= query) & (at >= first_seen(query, first, sliding_window))
    node = at - start
    word = jnp.where(node < 32, tree_mask[:, :, :1], tree_mask[:, :, 1:])
    bit = (word >> (node & 31).astype(jnp.uint32)) & 1
    return inside & (at >= first) & ((node < 0) | ((node < 64) & (bit != 0)))


def _accumulate(softmax: tuple, scores: Float[Array, "b t h s"], latent: Float[Array, "b s c"]) -> tuple:
    """Adds a block of scores to (running maximum, running sum, running weighted sum)."""
    maximum, total, weighted = softmax
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    shift = jnp.where(new_maximum == -jnp.inf, 0, new_maximum)  # nothing seen yet: avoid -inf minus -inf
    rescale = jnp.exp(maximum - shift)
    weights = jnp.exp(scores - shift[..., None])
    block = jnp.einsum("bths,bsc->bthc", weights, latent, preferred_element_type=jnp.float32)
    return new_maximum, total * rescale + jnp.sum(weights, axis=-1), weighted * rescale[..., None] + block
