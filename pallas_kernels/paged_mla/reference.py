"""XLA implementation: works everywhere, and its cost follows the context in use, not the table's width."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

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
) -> Float[Array, "b t h c"]:
    """Streams blocks of pages through a running softmax (arXiv:2112.05682), in float32.

    The loop ends with the longest row of the batch.
    """
    batch, num_queries, heads, width = q_latent.shape
    page_size = latent_pool.shape[2]
    pages = max(1, min(BLOCK_TOKENS // page_size, page_ids.shape[1]))
    page_ids = jnp.pad(page_ids, ((0, 0), (0, -page_ids.shape[1] % pages)))
    end = start + length
    # The last position each query sees; -1 in a row without queries.
    last = jnp.minimum(start[:, None] + jnp.arange(num_queries)[None], jnp.where(length > 0, end, 0)[:, None] - 1)

    def visit(block: Array, softmax: tuple) -> tuple:
        ids = lax.dynamic_slice_in_dim(page_ids, block * pages, pages, axis=1)
        latent = latent_pool[layer, ids].reshape(batch, pages * page_size, width)
        rope = rope_pool[layer, ids].reshape(batch, pages * page_size, -1)
        positions = block * pages * page_size + jnp.arange(pages * page_size)
        seen = (positions[None, None] <= last[:, :, None]) & (positions >= first)[None, None]
        # A slot nobody sees may hold anything: 0 * NaN would still be NaN.
        latent = jnp.where(seen[:, -1, :, None], latent, 0)
        scores = jnp.einsum("bthc,bsc->bths", q_latent, latent, preferred_element_type=jnp.float32)
        scores += jnp.einsum("bthr,bsr->bths", q_rope, rope, preferred_element_type=jnp.float32)
        return _accumulate(softmax, jnp.where(seen[:, :, None], scores * scale, -jnp.inf), latent)

    shape = (batch, num_queries, heads)
    softmax = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, width)))
    num_blocks = (jnp.max(last) + pages * page_size) // (pages * page_size)
    _, total, weighted = lax.fori_loop(0, num_blocks, visit, softmax)
    return (weighted / jnp.where(total > 0, total, 1)[..., None]).astype(q_latent.dtype)


def _accumulate(softmax: tuple, scores: Float[Array, "b t h s"], latent: Float[Array, "b s c"]) -> tuple:
    """Adds a block of scores to (running maximum, running sum, running weighted sum)."""
    maximum, total, weighted = softmax
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    shift = jnp.where(new_maximum == -jnp.inf, 0, new_maximum)  # nothing seen yet: avoid -inf minus -inf
    rescale = jnp.exp(maximum - shift)
    weights = jnp.exp(scores - shift[..., None])
    block = jnp.einsum("bths,bsc->bthc", weights, latent, preferred_element_type=jnp.float32)
    return new_maximum, total * rescale + jnp.sum(weights, axis=-1), weighted * rescale[..., None] + block
