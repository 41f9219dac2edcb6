"""FP8 latents: float8_e4m3fn with one float32 scale per 128 columns of a token, as in vLLM's "fp8_ds_mla" cache.

A scale is a power of two, as DeepSeek's ue8m0 scales are, and between 2^-15 and 2^7: every dequantised latent is
then exact in float16 and in bfloat16. Pools of scales have the slots of a page last, [layers, pages, blocks, slots]:
attention reads a block's together.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 128  # columns of a scale
MIN_SCALE, MAX_SCALE = 2.0**-15, 2.0**7
MAX = 448.0  # the largest float8_e4m3fn
DTYPE = jnp.float8_e4m3fn


def check_scales(latent_pool: Array, scale_pool: Array | None) -> None:
    """Raises ValueError where the pools do not belong together: FP8 latents have scales, others have none."""
    if scale_pool is None:
        if latent_pool.dtype == DTYPE:
            raise ValueError("scale_pool: got None, expected an array beside float8_e4m3fn latents")
        return
    layers, pages, slots, width = latent_pool.shape
    expected = ("float8_e4m3fn", "float32", (layers, pages, width // BLOCK, slots))
    got = (str(latent_pool.dtype), str(scale_pool.dtype), scale_pool.shape)
    if got != expected or width % BLOCK:
        raise ValueError(
            f"scale_pool: got {got[0]} latents {width} wide with {got[1]} scales of shape {got[2]}, "
            f"expected {expected[0]} latents a multiple of {BLOCK} wide with {expected[1]} scales of {expected[2]}"
        )


def quantize(latent: Float[Array, "*t c"]) -> tuple[Float[Array, "*t c"], Float[Array, "*t g"]]:
    """Rounds latents to float8_e4m3fn, c a multiple of 128, and returns them with their g = c / 128 scales.

    A scale is the smallest that brings its block within 448. What lies beyond 448 * 2^7 saturates; NaN stays NaN.
    """
    kept = jnp.finfo(latent.dtype)
    # XLA may leave out the rounding to bfloat16 where a float32 is wanted again, unless told so.
    wide = lax.reduce_precision(latent.astype(jnp.float32), kept.nexp, kept.nmant)
    blocks = wide.reshape(*latent.shape[:-1], -1, BLOCK)
    scale, inverse = block_scales(jnp.max(magnitude(blocks), axis=-1, keepdims=True))
    return round_to_fp8(blocks * inverse).reshape(latent.shape), scale[..., 0]


def dequantize(latent: Float[Array, "*t c"], scale: Float[Array, "*t g"]) -> Float[Array, "*t c"]:
    """The latents in float32."""
    blocks = latent.astype(jnp.float32).reshape(*latent.shape[:-1], -1, BLOCK)
    return (blocks * scale[..., None]).reshape(latent.shape)


# What follows is elementwise and exact, so that XLA and a kernel find the same.


def magnitude(x: Float[Array, "*s"]) -> Int[Array, "*s"]:
    """Bits of |x|, which order as |x| does, with NaN as the largest."""
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def block_scales(amax: Int[Array, "*s"]) -> tuple[Float[Array, "*s"], Float[Array, "*s"]]:
    """2^ceil(log2(amax / 448)) within the bounds, and its inverse, where `amax` is a block's largest magnitude."""
    low, high = (_bits(MAX * bound) for bound in (MIN_SCALE, MAX_SCALE))
    # 448 is 1.75 * 2^8: a fraction above .75 carries into the exponent.
    exponent = ((jnp.clip(amax, low, high) + 0x1FFFFF) >> 23) - 8
    return tuple(lax.bitcast_convert_type(e << 23, jnp.float32) for e in (exponent, 254 - exponent))


def round_to_fp8(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """x in float8_e4m3fn, ties to even. What exceeds 448 saturates, which a plain conversion makes NaN; NaN stays."""
    return jnp.clip(x, -MAX, MAX).astype(DTYPE)


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))
