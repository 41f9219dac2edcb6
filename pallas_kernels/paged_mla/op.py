"""Public entry of the op: shape checks, then a backend."""

from __future__ import annotations

from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.compat import not_hopper
from pallas_kernels.fp8 import check_scales
from pallas_kernels.paged_mla.mosaic import paged_mla_mosaic, unsupported
from pallas_kernels.paged_mla.reference import paged_mla_reference
from pallas_kernels.paged_mla.splits import Splits

TREE_NODES = 64  # bits of a query's mask


def paged_mla(
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
    splits: Splits | None = None,
    backend: str | None = None,
) -> Float[Array, "b t h c"]:
    """Absorbed MLA: softmax(scale * (q_latent . latent + q_rope . rope)) over the cache, times the latents.

    Query j < length[b] of row b stands at position `start[b] + j` and sees the positions from `first` up to its
    own, all of which must be in the cache already. With a tree mask it sees those before `start[b]`, and of the
    `length[b]` positions from there on those whose bit is set. Values that no query of a row may see change nothing,
    not even as NaN.

    Args:
        q_latent: queries absorbed into the latent space.
        q_rope: rotated queries.
        latent_pool: latents of every layer, page and slot; FP8 ones (`pallas_kernels.fp8`) have a `scale_pool`.
        rope_pool: rotated keys, likewise.
        layer: which layer of the pools to read.
        page_ids: pages of each row in order of position; ids beyond the positions in use are not read.
        start: position of the first query of each row.
        length: how many queries of each row count; the others give nothing of use, but nothing that is not finite.
        scale: multiplies the scores.
        first: positions below it are seen by no query.
        scale_pool: scales of FP8 latents.
        tree_mask: of each query 64 bits, the low word first: bit i is for position `start[b] + i`. Up to 64 queries.
        sliding_window: how many positions a query sees at most, its own included, as in Hugging Face's configs.
        splits: who attends to what in the Mosaic kernels, from `plan_splits`; made in every call when not given.
        backend: "mosaic" (Hopper GPUs), "xla", or None for the first of these that can.

    Returns:
        Attention-weighted latents, in the dtype of `q_latent`; zeros where a query sees nothing.

    Raises:
        ValueError: shapes that do not belong together, or an unknown backend.
        NotImplementedError: the backend asked for cannot do this; the message says why.
    """
    arrays = (q_latent, q_rope, latent_pool, rope_pool)
    _check_shapes(*arrays, page_ids)
    check_scales(latent_pool, scale_pool)
    _check_mask(q_latent.shape[1], tree_mask, sliding_window)
    if backend not in (None, "mosaic", "xla"):
        raise ValueError(f"unknown backend: got {backend!r}, expected 'mosaic', 'xla' or None")
    where = (layer, page_ids, start, length, scale, first)
    options = {"scale_pool": scale_pool, "tree_mask": tree_mask, "sliding_window": sliding_window}
    if backend != "xla":
        reason = not_hopper() or unsupported(*arrays)
        if reason is None:
            return paged_mla_mosaic(*arrays, *where, **options, splits=splits)
        if backend == "mosaic":
            raise NotImplementedError(f"the Mosaic backend of paged_mla cannot: {reason}")
    return paged_mla_reference(*arrays, *where, **options)


def _check_shapes(q_latent: Array, q_rope: Array, latent_pool: Array, rope_pool: Array, page_ids: Array) -> None:
    if latent_pool.shape[:3] != rope_pool.shape[:3]:
        raise ValueError(
            f"the two pools must agree in layers, pages and page size: got {latent_pool.shape[:3]} and "
            f"{rope_pool.shape[:3]}"
        )
    widths = (q_latent.shape[-1], q_rope.shape[-1])
    expected = (latent_pool.shape[-1], rope_pool.shape[-1])
    if widths != expected:
        raise ValueError(f"query widths must be those of the pools: got {widths}, expected {expected}")
    room = page_ids.shape[1] * latent_pool.shape[2]
    if q_latent.shape[1] > room:
        raise ValueError(f"{q_latent.shape[1]} query tokens do not fit a table of {room} slots per row")


def _check_mask(num_queries: int, tree_mask: Array | None, sliding_window: int | None) -> None:
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, the query's own position: got {sliding_window}")
    if tree_mask is None:
        return
    if sliding_window is not None:
        raise ValueError(
            f"got a tree mask and sliding_window {sliding_window}: give one of the two, for a mask does not say at "
            "which position a node stands"
        )
    if num_queries > TREE_NODES:
        raise ValueError(f"a tree mask is for up to {TREE_NODES} query tokens: got {num_queries}")
