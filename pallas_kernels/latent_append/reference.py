"""What the fused op computes before it writes, in XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def norm_rope(
    projected: Float[Array, "b t w"],
    norm_weight: Float[Array, "c"],
    angles: Float[Array, "b t two half"],
    eps: float,
    interleave: bool,
    multiplier: float,
) -> tuple[Float[Array, "b t c"], Float[Array, "b t r"]]:
    """Splits each token's projection and returns its normalised latent and its rotated key.

    Statistics and rotation are in float32. The normalised latent is rounded to the dtype of `projected` before each
    of the two multiplications (weight, multiplier), as in transformers' DeepseekV3RMSNorm.
    """
    latent, key = jnp.split(projected, [norm_weight.shape[0]], axis=-1)
    wide = latent.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    latent = (wide * scale).astype(latent.dtype) * jnp.broadcast_to(norm_weight, latent.shape)
    first, second = (key[..., 0::2], key[..., 1::2]) if interleave else jnp.split(key, 2, axis=-1)
    cos, sin = angles[:, :, 0], angles[:, :, 1]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return latent * multiplier, rotated.astype(key.dtype)
