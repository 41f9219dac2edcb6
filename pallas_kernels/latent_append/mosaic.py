"""The fused op as a Mosaic GPU kernel: one block of one warpgroup writes one token.

A decode step has few tokens, so latency decides: a token's loads are issued together, the one reduction goes over
shuffles and 16 bytes of shared memory, and both results go from registers to their page. No TMA: a scattered row
gains nothing by it, and staging would add two barriers. Of FP8 latents a warp has a block, whose scale is one
reduction within it.
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

from pallas_kernels import fp8
from pallas_kernels.compat import gpu_kernel, store_global

THREADS = 128
WARPS = 4
PAIRS = 32  # of a rotated key: one per lane of a warp


def unsupported(latent_pool: Array, rope_pool: Array, projected: Array, norm_weight: Array) -> str | None:
    """Why the kernel cannot take these arrays, or None if it can."""
    dtypes = [str(x.dtype) for x in (latent_pool, rope_pool, projected, norm_weight)]
    wide = dtypes[2:] if dtypes[:2] == ["float8_e4m3fn", "bfloat16"] else dtypes
    if len(set(wide)) > 1 or wide[0] not in ("bfloat16", "float32"):
        return (
            "pools, projection and norm must be all bfloat16 or all float32, the pools perhaps float8_e4m3fn and "
            f"bfloat16: got {', '.join(dtypes)}"
        )
    columns = THREADS if wide is dtypes else WARPS * fp8.BLOCK
    if latent_pool.shape[-1] % columns:
        return f"the latent's width must be a multiple of {columns}: got {latent_pool.shape[-1]}"
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
    scale_pool: Float[Array, "n p g s"] | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "n p _ _"], ...]:
    """The op by the kernel; `interpret` takes InterpretGPUParams and runs it on any device.

    The pools pass as references of this call alone. Compiled, they are operands aliased to results, which XLA
    updates in place wherever nothing reads the old pools later: no different from one scatter. Under `jax.shard_map`
    it takes check_vma=False: jax 0.12 refuses references whose values differ between devices.
    """
    tokens = slots.size
    rows = projected.reshape(tokens, -1)
    pools = [jax.new_ref(latent_pool), jax.new_ref(rope_pool)]
    if scale_pool is not None:  # the same memory again: blocks lie on an axis of their own
        blocks = latent_pool.reshape(*latent_pool.shape[:3], -1, fp8.BLOCK)
        pools = [jax.new_ref(blocks), pools[1], jax.new_ref(scale_pool)]
    body = functools.partial(
        _append_token,
        page_size=latent_pool.shape[2],
        eps=eps,
        interleave=interleave,
        multiplier=multiplier,
        interpreted=interpret is not None,
    )
    gpu_kernel(
        lambda *refs: body(refs[: len(pools)], *refs[len(pools) :]),
        name="norm_rope_append",
        out_type=(),
        grid={"token": tokens},
        scratch={},
        reduction_scratch_bytes=4 * WARPS,
        unsafe_no_auto_barriers=True,  # two barriers would surround each store otherwise
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
    latent, *others = (jax.freeze(pool) for pool in pools)
    return (latent.reshape(latent_pool.shape), *others)


def _append_token(
    pools: tuple[Any, ...],
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
    interpreted: bool,
) -> None:
    """Kernel body: all arguments are references in global memory, tokens first.

    The pools are (latent, rope), or those of FP8: (latent in blocks, rope, scale).
    """
    latent_pool, rope_pool, *scale_pool = pools
    token, width = lax.axis_index("token"), norm_weight.shape[0]
    slot = slots[token]
    place = (layer[0], lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size)))
    # Loads come before the reduction's barriers, which the compiler moves none across.
    load = functools.partial(_load_blocks, interpreted=interpreted) if scale_pool else _load_latent
    x, weight = (load(ref) for ref in (rows.at[token, pl.ds(0, width)], norm_weight))
    first, second = (_load_half(ref) for ref in _halves(rows, pairs, token, width, interleave))
    cos, sin = (_load_half(angles.at[token, i]) for i in (0, 1))
    rotated = first * cos - second * sin, second * cos + first * sin
    for i, half in enumerate(rotated):
        _store(rope_pool.at[(*place, pl.ds(i * PAIRS, PAIRS))], half)
    squares = jnp.sum(x * x, axis=1) if scale_pool else x * x
    scale = lax.rsqrt(jnp.sum(squares) / width + eps)
    round_ = functools.partial(_round, dtype=rows.dtype)
    latent = round_(round_(x * scale) * weight)
    if multiplier != 1.0:  # in the array's dtype, as a Python number is beside an array
        latent = latent * float(np.asarray(multiplier, rows.dtype))
    if scale_pool:
        latent, block_scale = _quantize(round_(latent))
        _store(scale_pool[0].at[(*place[:2], slice(None), place[2])], block_scale)
    _store(latent_pool.at[place], latent)


def _quantize(latent: Float[Array, "g block"]) -> tuple[Float[Array, "g block"], Float[Array, "g"]]:
    """`fp8.quantize` of blocks."""
    scale, inverse = fp8.block_scales(jnp.max(fp8.magnitude(latent), axis=1))
    return fp8.round_to_fp8(latent * jnp.broadcast_to(inverse[:, None], latent.shape)), scale


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


def _load_blocks(ref: Any, interpreted: bool) -> Float[Array, "g block"]:
    """The same in blocks of FP8, one in a warp."""
    num_blocks = ref.shape[0] // fp8.BLOCK
    if interpreted:  # it knows no reference of another shape
        return ref[...].reshape(num_blocks, fp8.BLOCK).astype(jnp.float32)
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, fp8.BLOCK), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )
    return plgpu.load(ref.reshape(num_blocks, fp8.BLOCK), layout=layout, optimized=False).astype(jnp.float32)


def _load_half(ref: Any) -> Float[Array, "half"]:
    """32 elements, one per lane, in float32. All four warps hold them, and all will store the same."""
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((PAIRS,), (1,))), warp_dims=(plgpu.Replicated(WARPS),), lane_dims=(-2,), vector_dim=-1
    )
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _store(ref: Any, value: Float[Array, "*w"]) -> None:
    store_global(ref, value.astype(ref.dtype))


def _round(value: Float[Array, "*w"], dtype: Any) -> Float[Array, "*w"]:
    return value.astype(dtype).astype(jnp.float32)
