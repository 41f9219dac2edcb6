"""Public entries: the bare scatter, in XLA, and the fused op with a choice of backends."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.compat import not_hopper
from pallas_kernels.fp8 import check_scales, quantize
from pallas_kernels.latent_append.mosaic import norm_rope_append_mosaic, unsupported
from pallas_kernels.latent_append.reference import norm_rope


def latent_append(
    latent_pool: Float[Array, "n p s c"],
    rope_pool: Float[Array, "n p s r"],
    layer: Int[Array, ""],
    slots: Int[Array, "b t"],
    latent: Float[Array, "b t c"],
    rope: Float[Array, "b t r"],
    scale_pool: Float[Array, "n p g s"] | None = None,
) -> tuple[Float[Array, "n p _ _"], ...]:
    """Stores row b's token j at `slots[b, j]` of `layer`, in every pool.

    Args:
        latent_pool: latents of every layer, page and slot; FP8 ones are quantized here (`pallas_kernels.fp8`).
        rope_pool: rotated keys, likewise.
        layer: the layer that writes.
        slots: page * page_size + offset of each token; page 0 is scratch, where order does not matter.
        latent: normalised latents.
        rope: rotated keys.
        scale_pool: scales of FP8 latents.

    Returns:
        The pools given: latents, keys, scales. In place when they are donated or carried by a loop; but on a CPU,
        where XLA cannot scatter FP8, the latents are copied in every call.

    Raises:
        ValueError: FP8 latents without scales, or others with them.
    """
    check_scales(latent_pool, scale_pool)
    pages, offsets = slots // latent_pool.shape[2], slots % latent_pool.shape[2]
    scales = ()
    if scale_pool is not None:
        latent, scale = quantize(latent)
        scales = (scale_pool.at[layer, pages, :, offsets].set(scale),)
    return (
        latent_pool.at[layer, pages, offsets].set(latent.astype(latent_pool.dtype)),
        rope_pool.at[layer, pages, offsets].set(rope.astype(rope_pool.dtype)),
        *scales,
    )


def norm_rope_append(
    latent_pool: Float[Array, "n p s c"],
    rope_pool: Float[Array, "n p s r"],
    layer: Int[Array, ""],
    slots: Int[Array, "b t"],
    projected: Float[Array, "b t w"],
    norm_weight: Float[Array, "c"],
    angles: Float[Array, "b t two half"],
    eps: float,
    *,
    interleave: bool = True,
    multiplier: float = 1.0,
    scale_pool: Float[Array, "n p g s"] | None = None,
    backend: str | None = None,
) -> tuple[Float[Array, "n p _ _"], ...]:
    """Normalises and rotates what the projection gives for new tokens, and stores it as `latent_append` does.

    Args:
        latent_pool: latents of every layer, page and slot; FP8 ones are quantized from the dtype of `projected`.
        rope_pool: rotated keys, likewise.
        layer: the layer that writes.
        slots: page * page_size + offset of each token; page 0 is scratch, where order does not matter.
        projected: raw latent of each token, then its raw key. Not split, for a slice would cost a kernel of its own.
        norm_weight: weight of the latent's RMSNorm.
        angles: cos and sin of each token's position by rotary pair, in float32.
        eps: of the RMSNorm.
        interleave: whether the pairs of the raw key are adjacent, or half a width apart. Stored keys are always
            half-split.
        multiplier: of the normalised latent.
        scale_pool: scales of FP8 latents.
        backend: "mosaic" (Hopper GPUs), "xla", or None for the first of these that can.

    Returns:
        The pools given: latents, keys, scales. In place when they are donated or carried by a loop.

    Raises:
        ValueError: shapes or pools that do not belong together, or a backend that does not exist.
        NotImplementedError: the backend asked for cannot, and why.
    """
    arrays = (latent_pool, rope_pool, layer, slots, projected, norm_weight, angles)
    _check_shapes(*arrays)
    check_scales(latent_pool, scale_pool)
    if backend not in (None, "mosaic", "xla"):
        raise ValueError(f"unknown backend: got {backend!r}, expected 'mosaic', 'xla' or None")
    if backend != "xla":
        reason = not_hopper() or unsupported(latent_pool, rope_pool, projected, norm_weight)
        if reason is None:
            return norm_rope_append_mosaic(*arrays, eps, interleave, multiplier, scale_pool)
        if backend == "mosaic":
            raise NotImplementedError(f"the Mosaic backend of norm_rope_append cannot: {reason}")
    latent, rope = norm_rope(projected, norm_weight, angles, eps, interleave, multiplier)
    return latent_append(latent_pool, rope_pool, layer, slots, latent, rope, scale_pool)


def _check_shapes(
    latent_pool: Array,
    rope_pool: Array,
    layer: Array,
    slots: Array,
    projected: Array,
    norm_weight: Array,
    angles: Array,
) -> None:
    width, rope = latent_pool.shape[-1], rope_pool.shape[-1]
    expected = {
        "rope_pool": (rope_pool, (*latent_pool.shape[:3], rope)),
        "layer": (layer, ()),
        "projected": (projected, (*slots.shape, width + rope)),
        "norm_weight": (norm_weight, (width,)),
        "angles": (angles, (*slots.shape, 2, rope // 2)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} must fit the pools and the slots: got {array.shape}, expected {shape}")
