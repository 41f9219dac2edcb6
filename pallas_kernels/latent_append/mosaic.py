"""The fused op as a Mosaic GPU kernel: one block of one warpgroup writes one token.

A decode step has few tokens, so latency decides: a token's loads are issued together, the one reduction goes over
shuffles and 16 bytes of shared memory, and both results go from registers to their page. No TMA: a scattered row
gains nothing by it, and staging would add two barriers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.compat import store_global

THREADS = 128
PAIRS = 32  # of a rotated key: one per lane of a warp


def unsupported(latent_pool: Array, rope_pool: Array, projected: Array, norm_weight: Array) -> str | None:
    """Why the kernel cannot take these arrays, or None if it can."""
    dtypes = [str(x.dtype) for x in (latent_pool, rope_pool, projected, norm_weight)]
    if len(set(dtypes)) > 1 or dtypes[0] not in ("bfloat16", "float32"):
        return f"pools, projection and norm must be all bfloat16 or all float32: got {', '.join(dtypes)}"
    if latent_pool.shape[-1] % THREADS:
        return f"the latent's width must be a multiple of {THREADS}: got {latent_pool.shape[-1]}"
    if rope_pool.shape[-1] != 2 * PAIRS:
        return f"the key must be {2 * PAIRS} wide: got {rope_pool.shape[-1]}"
    return None


def norm_rope_append_mosaic(
    latent_pool: Float[Array, "n p s c"],
    rope_pool: Float[Array, "n p s r"],
    layer: Int[Array, ""],
    slots: Int[Array, "b t"],
    projected: Float[Array, "b t w"],
    norm_weight: Float[Array, "c"],
    angles: Float[Array, "b t two half"],
    eps: float,
    interleave: bool,
    multiplier: float,
    interpret: Any = None,
) -> tuple[Float[Array, "n p s c"], Float[Array, "n p s r"]]:
    """The op by the kernel; `interpret` takes InterpretGPUParams and runs it on any device.

    The pools pass as references of this call alone. Compiled, they are operands aliased to results, which XLA
    updates in place wherever nothing reads the old pools later: no different from one scatter. Under `jax.shard_map`
    it takes check_vma=False: jax 0.12 refuses references whose values differ between devices.
    """
    tokens = slots.size
    rows = projected.reshape(tokens, -1)
    body = functools.partial(
        _append_token,
        page_size=latent_pool.shape[2],
        eps=eps,
        interleave=interleave,
        multiplier=multiplier,
    )
    pools = jax.new_ref(latent_pool), jax.new_ref(rope_pool)
    plgpu.kernel(
        body,
        grid=(tokens,),
        grid_names=("token",),
        kernel_name="norm_rope_append",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Safe: the kernel reads nothing that it writes. Two barriers would surround each store otherwise.
            unsafe_no_auto_barriers=True,
        ),
        interpret=interpret,
    )(
        *pools,
        layer.astype(jnp.int32).reshape(1),
        slots.astype(jnp.int32).reshape(tokens),
        rows,
        rows.reshape(tokens, -1, 2),  # the same memory: elements of a pair lie on an axis of their own
        norm_weight,
        angles.reshape(tokens, 2, PAIRS),
    )
    return tuple(jax.freeze(pool) for pool in pools)


def _append_token(
    latent_pool: Any,
    rope_pool: Any,
    layer: Any,
    slots: Any,
    rows: Any,
    pairs: Any,
    norm_weight: Any,
    angles: Any,
    *,
    page_size: int,
    eps: float,
    interleave: bool,
    multiplier: float,
) -> None:
    """Kernel body: all arguments are references in global memory, tokens first."""
    token, width = lax.axis_index("token"), latent_pool.shape[-1]
    slot = slots[token]
    place = (layer[0], lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size)))
    # Loads come before the reduction's barriers, which the compiler moves none across.
    x, weight = (_load_latent(ref) for ref in (rows.at[token, pl.ds(0, width)], norm_weight))
    first, second = (_load_half(ref) for ref in _halves(rows, pairs, token, width, interleave))
    cos, sin = (_load_half(angles.at[token, i]) for i in (0, 1))
    rotated = first * cos - second * sin, second * cos + first * sin
    for i, half in enumerate(rotated):
        _store(rope_pool.at[(*place, pl.ds(i * PAIRS, PAIRS))], half)
    scale = lax.rsqrt(jnp.sum(x * x) / width + eps)
    round_ = functools.partial(_round, dtype=latent_pool.dtype)
    latent = round_(round_(x * scale) * weight)
    if multiplier != 1.0:  # in the array's dtype, as a Python number is beside an array
        latent = latent * float(np.asarray(multiplier, latent_pool.dtype))
    _store(latent_pool.at[place], latent)


def _halves(rows: Any, pairs: Any, token: Any, width: int, interleave: bool) -> tuple[Any, Any]:
    """References to the first and to the second elements of the key's pairs."""
    if interleave:
        return tuple(pairs.at[token, pl.ds(width // 2, PAIRS), i] for i in (0, 1))
    return tuple(rows.at[token, pl.ds(width + i * PAIRS, PAIRS)] for i in (0, 1))


def _load_latent(ref: Any) -> Float[Array, "c"]:
    """A vector spread over the warpgroup, in float32: neighbours in one thread, up to 8 bytes of bfloat16."""
    width = ref.shape[0]
    vector = next(n for n in (4, 2, 1) if width % (n * THREADS) == 0)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _load_half(ref: Any) -> Float[Array, "half"]:
    """32 elements, one per lane, in float32. All four warps hold them, and all will store the same."""
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((PAIRS,), (1,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
    )
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _store(ref: Any, value: Float[Array, "w"]) -> None:
    store_global(ref, value.astype(ref.dtype))


def _round(value: Float[Array, "w"], dtype: Any) -> Float[Array, "w"]:
    return value.astype(dtype).astype(jnp.float32)
