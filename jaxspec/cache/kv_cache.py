"""The pools: what attention remembers of every cached token, for all layers in one array each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig


@struct.dataclass
class KVCache:
    """Pools of n layers (the trunk's, then the MTP modules'), p pages and s slots a page.

    Attributes:
        latent: normalised latents.
        rope: rotated keys, one for all heads.
    """

    latent: Float[Array, "n p s c"]
    rope: Float[Array, "n p s r"]

    @classmethod
    def create(cls, config: ModelConfig, num_pages: int, page_size: int, dtype: Any) -> KVCache:
        """Empty pools; page 0 is scratch."""
        shape = (config.num_cached_layers, num_pages, page_size)
        return cls(
            latent=jnp.zeros((*shape, config.kv_lora_rank), dtype),
            rope=jnp.zeros((*shape, config.qk_rope_head_dim), dtype),
        )


def copy_page(cache: KVCache, source: Int[Array, ""], target: Int[Array, ""]) -> KVCache:
    """The pools with page `source` copied over page `target` in all layers; scratch onto itself is no copy."""
    return jax.tree.map(lambda pool: pool.at[:, target].set(pool[:, source]), cache)


def bytes_per_token(config: ModelConfig, dtype: Any) -> int:
    """Bytes one token takes in the pools of all layers, the MTP modules' included."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return config.num_cached_layers * width * jnp.dtype(dtype).itemsize
