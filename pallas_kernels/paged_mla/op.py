"""Public entry of the op: shape checks, then a backend."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.compat import not_hopper
from pallas_kernels.paged_mla.mosaic import paged_mla_mosaic, unsupported
from pallas_kernels.paged_mla.reference import paged_mla_reference
from pallas_kernels.paged_mla.splits import Splits


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
    splits: Splits | None = None,
    backend: str | None = None,
) -> Float[Array, "b t h c"]:
    """Absorbed MLA: softmax(scale * (q_latent . latent + q_rope . rope)) over the cache, times the latents.

    Query j < length[b] of row b stands at position `start[b] + j` and sees the positions from `first` up to its
    own, all of which must be in the cache already. Values the row may not see change nothing, not even as NaN.

    Args:
        q_latent: queries absorbed into the latent space.
        q_rope: rotated queries.
        latent_pool: latents of every layer, page and slot.
        rope_pool: rotated keys, likewise.
        layer: which layer of the pools to read.
        page_ids: pages of each row in order of position; ids beyond the positions in use are not read.
        start: position of the first query of each row.
        length: how many queries of each row count; the others give nothing of use, but nothing that is not finite.
        scale: multiplies the scores.
        first: positions below it are seen by no query.
        splits: who attends to what in the Mosaic kernel, from `make_splits`; made in every call when not given.
        backend: "mosaic" (Hopper GPUs), "xla", or None for the first of these that can.

    Returns:
        Attention-weighted latents, in the dtype of `q_latent`; zeros where a query sees nothing.

    Raises:
        ValueError: shapes that do not belong together, or an unknown backend.
        NotImplementedError: the backend asked for cannot do this; the message says why.
    """
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
    if backend not in (None, "mosaic", "xla"):
        raise ValueError(f"unknown backend: got {backend!r}, expected 'mosaic', 'xla' or None")
    arrays = (q_latent, q_rope, latent_pool, rope_pool)
    where = (layer, page_ids, start, length)
    if backend != "xla":
        reason = not_hopper() or unsupported(*arrays)
        if reason is None:
            return paged_mla_mosaic(*arrays, *where, scale, first, splits)
        if backend == "mosaic":
            raise NotImplementedError(f"the Mosaic backend of paged_mla cannot: {reason}")
    return paged_mla_reference(*arrays, *where, scale, first)
