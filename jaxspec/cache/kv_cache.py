"""The pools: what attention remembers of every cached token, for all layers in one array each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from pallas_kernels import fp8


@struct.dataclass
class KVCache:
    """Pools of n layers (the trunk's, then the MTP modules'), p pages and s slots a page.

    Attributes:
        latent: normalised latents.
        rope: rotated keys, one for all heads.
        scale: of FP8 latents, one per 128 columns; see `pallas_kernels.fp8`.
        compute_dtype: of activations, where they are not in the dtype of `rope`.
        backend: of the ops that read and write the pools, "mosaic" or "xla"; None: the first that can.
    """

    latent: Float[Array, "n p s c"]
    rope: Float[Array, "n p s r"]
    scale: Float[Array, "n p g s"] | None = None
    compute_dtype: Any = struct.field(pytree_node=False, default=None)
    backend: str | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: Any,
        compute_dtype: Any = None,
        backend: str | None = None,
    ) -> KVCache:
        """Empty pools; page 0 is scratch.

        Args:
            config: the architecture.
            num_pages: pages of the pools.
            page_size: slots a page.
            dtype: of the pools. With float8_e4m3fn that is the latents', and keys stay bfloat16.
            compute_dtype: of activations; None: that of the keys.
            backend: of the ops on the pools.

        Raises:
            ValueError: latents that do not divide into blocks of FP8.
        """
        pools = {}
        for name, (width, kind) in _pools(config, dtype).items():
            sizes = (width, page_size) if name == "scale" else (page_size, width)
            pools[name] = jnp.zeros((config.num_cached_layers, num_pages, *sizes), kind)
        compute_dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
        return cls(**pools, compute_dtype=compute_dtype, backend=backend)

    @property
    def activations(self) -> Any:
        """The dtype of activations."""
        return self.rope.dtype if self.compute_dtype is None else self.compute_dtype


def copy_page(cache: KVCache, source: Int[Array, ""], target: Int[Array, ""]) -> KVCache:
    """The pools with page `source` copied over page `target` in all layers; scratch onto itself is no copy."""
    return jax.tree.map(lambda pool: pool.at[:, target].set(pool[:, source]), cache)


def bytes_per_token(config: ModelConfig, dtype: Any) -> int:
    """Bytes one token takes in the pools of all layers, the MTP modules' included; errors as in `KVCache.create`."""
    return config.num_cached_layers * sum(width * kind.itemsize for width, kind in _pools(config, dtype).values())


def _pools(config: ModelConfig, dtype: Any) -> dict[str, tuple[int, Any]]:
    """Width and dtype of each pool."""
    latent, rope, dtype = config.kv_lora_rank, config.qk_rope_head_dim, jnp.dtype(dtype)
    if dtype != fp8.DTYPE:
        return {"latent": (latent, dtype), "rope": (rope, dtype)}
    if latent % fp8.BLOCK:
        raise ValueError(f"kv_lora_rank: got {latent}, expected a multiple of {fp8.BLOCK} for an FP8 KV cache")
    return {
        "latent": (latent, dtype),
        "rope": (rope, jnp.dtype("bfloat16")),
        "scale": (latent // fp8.BLOCK, jnp.dtype("float32")),
    }
