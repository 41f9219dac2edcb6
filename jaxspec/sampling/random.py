"""Counter-based noise: every number is a function of (seed, position, purpose, token id) and nothing else.

No stream is advanced, so a request draws the same numbers alone or in any batch, in any step, with any draft
length, after a preemption or a restart.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Key, UInt32


class Purpose(enum.IntEnum):
    """What a draw is for; draws at one position with different purposes are independent.

    SAMPLE: the target's own token. DRAFT: a drafter's token under the rejection rule. ACCEPT: the uniform
    number a draft is tested with.
    """

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2


def row_keys(seed: UInt32[Array, "b 2"], positions: Int32[Array, "b t"], purpose: Purpose) -> Key[Array, "b t"]:
    """A key per row and position. A position is the index, in its sequence, of the token being drawn.

    Position and purpose are folded in as one number, distinct for positions below 2^30. The generator is named, so
    that the process-wide `jax_default_prng_impl` does not change outputs.
    """
    keys = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))(keys, 4 * positions + int(purpose))


def gumbel(keys: Key[Array, "b t"], vocab: int) -> Float32[Array, "b t {vocab}"]:
    """Standard Gumbel noise, always finite (between -2.9 and 23). A token's noise does not depend on `vocab`."""
    return -jnp.log(-jnp.log1p(-_unit(keys, vocab)))


def uniform(keys: Key[Array, "b t"]) -> Float32[Array, "b t"]:
    """Uniform numbers in the open interval (0, 1)."""
    return _unit(keys, 1)[:, :, 0]


def _unit(keys: Key[Array, "b t"], width: int) -> Float32[Array, "b t {width}"]:
    """Uniform numbers in (0, 1), 2^-32 apart near 0.

    `jax.random.uniform` has steps of 2^-23: with 10^5 tokens, those less likely than that could never be drawn.
    Here -log1p(-u) is exact to 2^-32, at no extra bits. Values that would round to 1 become 1 - 2^-24.
    """
    # The partitionable counter makes a token's bits independent of the width and of how arrays are sharded; the
    # process-wide flag of that name must not change outputs either.
    with jax.threefry_partitionable(True):
        draw = jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (width,), jnp.uint32)))
        bits = draw(keys)
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
