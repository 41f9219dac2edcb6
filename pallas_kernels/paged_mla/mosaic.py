"""Mosaic GPU kernels for sm_90: attention of a batch's queries over a paged latent cache.

A row tile is `row_tile` rows of (query token, head). Each part of the GPU works through its run of rows and blocks
of positions (`splits.py`, `walk.py`). Two kernels do a tile's work, chosen by `tuning.py`: `few_rows.py` where memory
is the limit, and `many_rows.py` where the tensor cores are. A small third one puts together rows that parts shared.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int, UInt32

from pallas_kernels import compat
from pallas_kernels.paged_mla import few_rows, many_rows
from pallas_kernels.paged_mla.splits import Splits, make_splits
from pallas_kernels.paged_mla.tuning import FEW, tile_config
from pallas_kernels.paged_mla.walk import LATENT, ROPE, Call, operands

COLUMNS = plgpu.Layout.WG_STRIDED((LATENT,), vec_size=4)
COMBINED = 8  # shares of a row that are loaded at once


def paged_mla_mosaic(
    q_latent: BFloat16[Array, "b t h 512"],
    q_rope: BFloat16[Array, "b t h 64"],
    latent_pool: Float[Array, "n p s 512"],
    rope_pool: BFloat16[Array, "n p s 64"],
    layer: Int[Array, ""],
    page_ids: Int[Array, "b m"],
    start: Int[Array, "b"],
    length: Int[Array, "b"],
    scale: float,
    first: int = 0,
    *,
    scale_pool: Float[Array, "n p 4 s"] | None = None,
    tree_mask: UInt32[Array, "b t 2"] | None = None,
    sliding_window: int | None = None,
    splits: Splits | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> BFloat16[Array, "b t h 512"]:
    """The op by Mosaic kernels: arguments as in `paged_mla`.

    Args:
        splits: from `plan_splits` for arrays like these; made here when not given.
        interpret: run on the CPU with these parameters.

    Raises:
        NotImplementedError: `unsupported` says why.
    """
    if reason := unsupported(q_latent, q_rope, latent_pool, rope_pool):
        raise NotImplementedError(f"the Mosaic backend of paged_mla cannot: {reason}")
    batch, num_queries, heads, _ = q_latent.shape
    layers, num_pages, page_size, _ = latent_pool.shape
    rows = num_queries * heads
    config = tile_config(rows, page_size, str(latent_pool.dtype))
    if splits is None:
        splits = plan_splits(start, length, rows, page_size, str(latent_pool.dtype), first, sliding_window)
    call = Call(
        batch=batch,
        num_queries=num_queries,
        heads=heads,
        num_pages=num_pages,
        page_size=page_size,
        columns=page_ids.shape[1],
        num_parts=splits.parts.shape[0],
        scale=scale,
        first=first,
        sliding_window=sliding_window,
        tree=tree_mask is not None,
        quantised=scale_pool is not None,
        whole=config.num_parts(rows) is None,
        row_tile=config.row_tile,
        block_tokens=config.block_tokens,
        stages=config.stages,
        interpret=interpret,
    )
    q_latent, q_rope, q_scale = _scaled(q_latent, q_rope) if call.quantised else (q_latent, q_rope, None)
    pieces = (layers * num_pages * call.pieces, call.load_rows)
    arrays = (
        _packed(q_latent, call),
        _packed(q_rope, call),
        latent_pool.reshape(*pieces, LATENT),
        rope_pool.reshape(*pieces, ROPE),
        layer.astype(jnp.int32)[None],
        *(x.astype(jnp.int32) for x in (page_ids, start, length, *splits)),
        None if tree_mask is None else _packed_tree(tree_mask, call),
        None if scale_pool is None else scale_pool.reshape(layers * num_pages, -1, call.pieces, call.load_rows),
        None if q_scale is None else _packed(q_scale[..., None], call)[..., 0],
    )
    kernel = few_rows if config.kernel == FEW else many_rows
    out, *shared = _attention_kernel(call, kernel)(*(x for x in arrays if x is not None))
    if shared:
        out = jax.new_ref(out)
        _combine_kernel(call)(*shared, *(x.astype(jnp.int32) for x in splits), out)
        out = jax.freeze(out)
    return out[:, :rows].reshape(batch, num_queries, heads, LATENT)


def unsupported(q_latent: Array, q_rope: Array, latent_pool: Array, rope_pool: Array) -> str | None:
    """Why the kernels cannot take these arrays, or None if they can."""
    dtypes = [str(x.dtype) for x in (q_latent, q_rope, rope_pool)]
    if set(dtypes) != {"bfloat16"} or str(latent_pool.dtype) not in ("bfloat16", "float8_e4m3fn"):
        got = ", ".join((*dtypes, str(latent_pool.dtype)))
        return f"queries and rotated keys must be bfloat16, latents that or float8_e4m3fn: got {got}"
    widths = (latent_pool.shape[-1], rope_pool.shape[-1])
    if widths != (LATENT, ROPE):
        return f"the pools must be {(LATENT, ROPE)} wide: got {widths}"
    rows, page_size = q_latent.shape[1] * q_latent.shape[2], latent_pool.shape[2]
    if tile_config(rows, page_size, str(latent_pool.dtype)) is None:
        return f"there is no tile for {rows} rows (query tokens * heads) and pages of {page_size}"
    return None


def plan_splits(
    start: Int[Array, "b"],
    length: Int[Array, "b"],
    rows: int,
    page_size: int,
    dtype: str,
    first: int = 0,
    sliding_window: int | None = None,
) -> Splits | None:
    """The split table for calls of `rows` rows (query tokens * heads); None where no kernel would read it.

    Args:
        start: position of each row's first query.
        length: queries of each row.
        rows: query tokens * heads.
        page_size: slots of a page.
        dtype: of the latents in the cache, by name.
        first: as in `paged_mla`.
        sliding_window: likewise.
    """
    config = tile_config(rows, page_size, dtype)
    if config is None:
        return None
    return make_splits(start, length, config.num_parts(rows), config.block_tokens, first, sliding_window)


def _packed(queries: Array, call: Call) -> Array:
    """[b, t, h, c] as rows of (query, head), padded to whole tiles."""
    rows = queries.reshape(call.batch, call.num_queries * call.heads, queries.shape[-1])
    return jnp.pad(rows, ((0, 0), (0, call.tiles * call.row_tile - rows.shape[1]), (0, 0)))


def _packed_tree(tree_mask: UInt32[Array, "b t 2"], call: Call) -> Int[Array, "2 b rows"]:
    words = jnp.broadcast_to(tree_mask[:, :, None], (call.batch, call.num_queries, call.heads, 2))
    return lax.bitcast_convert_type(jnp.moveaxis(_packed(words, call), 2, 0), jnp.int32)


def _scaled(q_latent: Array, q_rope: Array) -> tuple[Array, Array, Array]:
    """Queries in the range of float16, which FP8 latents are multiplied in, and what undoes it: powers of two."""
    largest = jnp.max(jnp.abs(q_latent), axis=-1).astype(jnp.float32)
    exponent = jnp.frexp(jnp.where(largest > 0, largest, 1))[1] - 10  # the largest is in [512, 1024)
    scaled = (jnp.ldexp(x.astype(jnp.float32), -exponent[..., None]) for x in (q_latent, q_rope))
    scaled = next(scaled).astype(jnp.float16), next(scaled).astype(jnp.bfloat16)
    return *scaled, jnp.ldexp(jnp.float32(1), exponent)


def _attention_kernel(call: Call, kernel: Any) -> Any:
    slots, rows = 2 * call.num_parts, call.tiles * call.row_tile
    out = jax.ShapeDtypeStruct((call.batch, rows, LATENT), jnp.bfloat16)
    shared = (
        jax.ShapeDtypeStruct((slots, rows, LATENT), jnp.float32),
        jax.ShapeDtypeStruct((slots, rows), jnp.float32),
    )
    return compat.gpu_kernel(
        lambda *refs, **scratch: kernel.attention_body(call, operands(call, refs), **scratch),
        name=f"paged_mla_{kernel.__name__.rpartition('.')[2]}",
        out_type=(out,) if call.whole else (out, *shared),
        grid={"part": call.num_parts, "tile": call.tiles},
        scratch=kernel.scratch_types(call),
        warpgroups=2,
        reduction_scratch_bytes=kernel.REDUCTION_BYTES,
        interpret=call.interpret,
    )


def _combine_kernel(call: Call) -> Any:
    return compat.gpu_kernel(
        combine_body,
        name="paged_mla_combine",
        out_type=(),
        grid={"part": call.num_parts, "row": call.num_queries * call.heads},
        scratch={},
        unsafe_no_auto_barriers=True,  # they would have one load wait for another
        interpret=call.interpret,
    )


def combine_body(partial: Any, log_sum: Any, parts: Any, rows: Any, out: Any) -> None:
    """Puts a row of (query, head) together from the parts that shared it. Leaves those that one part did alone.

    A shared row is the last one of the part in which it starts, so there are no more of them than parts.
    """
    part, row = lax.axis_index("part"), lax.axis_index("row")
    batch = jnp.maximum(parts[part, 2], 0)
    first_part, last_part = rows[batch, 0], rows[batch, 1]

    def visit(turn: Array, carry: tuple) -> tuple:
        maximum, total, weighted = carry
        shares = [first_part + turn * COMBINED + i for i in range(COMBINED)]
        slots = [2 * jnp.minimum(p, last_part) + (p == first_part).astype(jnp.int32) for p in shares]
        values = [plgpu.load(partial.at[slot, row], layout=COLUMNS, optimized=False) for slot in slots]
        logs = [
            jnp.where(p <= last_part, log_sum[slot, row], -jnp.inf) for p, slot in zip(shares, slots, strict=True)
        ]
        new_maximum = functools.reduce(jnp.maximum, logs, maximum)
        shift = jnp.where(new_maximum == -jnp.inf, 0.0, new_maximum)
        rescale = jnp.exp2(maximum - shift)
        total, weighted = total * rescale, weighted * rescale
        for log, value in zip(logs, values, strict=True):
            weight = jnp.exp2(log - shift)
            total, weighted = total + weight, weighted + value * weight
        return new_maximum, total, weighted

    @pl.when((first_part == part) & (last_part > part))
    def _combine() -> None:
        carry = jnp.float32(-jnp.inf), jnp.float32(0), plgpu.layout_cast(jnp.zeros(LATENT, jnp.float32), COLUMNS)
        turns = lax.div(last_part - first_part, jnp.int32(COMBINED)) + 1
        _, total, weighted = lax.fori_loop(0, turns, visit, carry)
        result = weighted / jnp.where(total > 0, total, 1.0)
        compat.store_global(out.at[batch, row], result.astype(jnp.bfloat16))
