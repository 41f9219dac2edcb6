"""Public entry of the op, in XLA: one scatter per pool."""

from __future__ import annotations

from jaxtyping import Array, Float, Int


def latent_append(
    latent_pool: Float[Array, "n p s c"],
    rope_pool: Float[Array, "n p s r"],
    layer: Int[Array, ""],
    slots: Int[Array, "b t"],
    latent: Float[Array, "b t c"],
    rope: Float[Array, "b t r"],
) -> tuple[Float[Array, "n p s c"], Float[Array, "n p s r"]]:
    """Stores row b's token j at `slots[b, j]` of `layer`, in both pools.

    Args:
        latent_pool: latents of every layer, page and slot.
        rope_pool: rotated keys, likewise.
        layer: the layer that writes.
        slots: page * page_size + offset of each token; page 0 is scratch, where order does not matter.
        latent: normalised latents.
        rope: rotated keys.

    Returns:
        The two pools. In place when they are donated or carried by a loop.
    """
    pages, offsets = slots // latent_pool.shape[2], slots % latent_pool.shape[2]
    return (
        latent_pool.at[layer, pages, offsets].set(latent.astype(latent_pool.dtype)),
        rope_pool.at[layer, pages, offsets].set(rope.astype(rope_pool.dtype)),
    )
