"""Mosaic GPU kernel for row tiles of up to 48 rows, where memory is the limit: it pays for the rows there are.

wgmma computes 64 rows at a time. Here these are cached positions, or latent columns, and the queries' rows are the
other side, of which any multiple of 8 is paid for as it is: scores are latents @ queries^T, and the result is
latents^T @ weights^T. (TensorRT-LLM calls it swapping A and B.)

Two warpgroups own half of the latent and half of the rotary columns each. Each loads its columns of a block of 64
positions, and multiplies them with its columns of the queries: the sum of both products is the scores. Of these, each
finishes a share of the rows, for which it needs the other's half; the weights it finds go to shared memory, and each
multiplies them with its latent columns. So nothing but a block's scores and weights passes between the two, and a
place in the ring is its owner's alone. There is no producer warpgroup: three leave 168 registers a thread, which
`setmaxnreg` would have to shift, and nvJitLink, with which JAX assembles where it finds it, ignores that (C7504).

FP8 latents are converted to float16, where they are exact, with their scales, and multiplied with float16 queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import compat
from pallas_kernels.fp8 import BLOCK as SCALE_COLUMNS
from pallas_kernels.paged_mla.walk import (
    HALF,
    ROPE,
    Call,
    Cursor,
    Operands,
    Part,
    Segment,
    advance,
    clear_unseen,
    cursor_at,
    hidden_zero,
    is_masked,
    is_wanted,
    pages,
    row_mask,
    seen,
    this_part,
    tile_rows,
    visit_rows,
)

BLOCK = 64  # positions: wgmma's M
HALF_ROPE = ROPE // 2
NUM_SCALES = HALF // SCALE_COLUMNS  # of a position, for a warpgroup's columns
BY_ROW = plgpu.Layout.WGMMA.reduce(0)  # a vector along the second side of a product
REDUCTION_BYTES = 2048  # that a warpgroup's maxima over positions take, as these lie in four warps


class Shared(NamedTuple):
    """Shared memory and barriers, by the kernel's scratch names. Pairs are by warpgroup."""

    q_latent: Any  # [2, n, 256]
    q_rope: Any  # [2, n, 32]
    latent: Any  # [stages, 2, 64, 256]; [1, ...] in float16 when quantised
    fp8: Any  # [stages, 2, 64, 256]; None unless quantised
    scale: Any  # [stages, 2, 2, 64], likewise
    rope: Any  # [stages, 2, 64, 32]
    scores: Any  # [64, n] f32: of each row, the half that the warpgroup which does not finish the row has computed
    weights: Any  # [n, 64]
    rescale: Any  # [n]: what a block's new maxima make of the results so far; at a row's end, the sums
    loaded: Any  # [2 * stages]
    q_loaded: Any  # [2]
    pair: Any  # both warpgroups are here


class Softmax(NamedTuple):
    """Running softmax of a warpgroup: of its share of the rows the maxima in log2 units and the sums, not yet over
    positions; of all rows its columns of the result."""

    maximum: Float[Array, "share"]
    total: Float[Array, "64 share"]
    weighted: Float[Array, "256 n"]


def scratch_types(call: Call) -> dict[str, Any]:
    """Shared memory of a block of threads, at most 232,448 bytes on an H200."""
    rows, loads = call.row_tile, BLOCK // call.load_rows
    wide = jnp.float16 if call.quantised else jnp.bfloat16
    types = {
        "q_latent": compat.swizzled_tile((2, rows, HALF), wide),
        "q_rope": compat.swizzled_tile((2, rows, HALF_ROPE), jnp.bfloat16, HALF_ROPE),
        "latent": compat.swizzled_tile((1 if call.quantised else call.stages, 2, BLOCK, HALF), wide),
        "rope": compat.swizzled_tile((call.stages, 2, BLOCK, HALF_ROPE), jnp.bfloat16, HALF_ROPE),
        "scores": compat.swizzled_tile((BLOCK, rows), jnp.float32, 8),
        "weights": compat.swizzled_tile((rows, BLOCK), wide),
        "rescale": plgpu.SMEM((rows,), jnp.float32),
        "loaded": plgpu.Barrier(num_barriers=2 * call.stages, num_arrivals=(2 + NUM_SCALES * call.quantised) * loads),
        "q_loaded": plgpu.Barrier(num_barriers=2, num_arrivals=2),
        "pair": plgpu.Barrier(num_arrivals=2),
    }
    if call.quantised:
        types["fp8"] = compat.swizzled_tile((call.stages, 2, BLOCK, HALF), jnp.float8_e4m3fn)
        types["scale"] = plgpu.SMEM((call.stages, 2, NUM_SCALES, BLOCK), jnp.float32)
    return types


def share(call: Call, group: int) -> tuple[int, int]:
    """First row and number of rows that a warpgroup finishes: multiples of 8, as equal as can be."""
    first = -(-call.row_tile // 16) * 8
    return (0, first) if group == 0 else (first, call.row_tile - first)


def attention_body(call: Call, gmem: Operands, **scratch: Any) -> None:
    """One part's work on one row tile."""
    smem = Shared(**{"fp8": None, "scale": None} | scratch)
    part = this_part(gmem)
    for group in range(2):  # unrolled: slices of swizzled memory have static places
        body = functools.partial(_run_part, call, gmem, smem, part, group)
        if call.interpret is None:
            body = compat.with_own_reduction_scratch(body, group, REDUCTION_BYTES)
        pl.when(lax.axis_index("warpgroup") == group)(body)


def _run_part(call: Call, gmem: Operands, smem: Shared, part: Part, group: int) -> None:
    cursor = cursor_at(call, gmem, part, part.first_row)
    _load_queries(call, gmem, smem, part, cursor, group)
    for slot in range(call.stages):
        _load_block(call, gmem, smem, part, cursor, group, jnp.int32(slot))
        cursor = advance(call, gmem, part, cursor)

    def store_zeros(row: Array) -> None:
        _store(call, gmem.out.at[row], group, _zeros(call))

    def run(here: Segment, carry: tuple) -> tuple:
        return _run_row(call, gmem, smem, part, group, here, carry)

    visit_rows(call, gmem, part, run, store_zeros, (jnp.int32(0), cursor))


def _zeros(call: Call) -> Float[Array, "256 n"]:
    return plgpu.layout_cast(jnp.zeros((HALF, call.row_tile), jnp.float32), plgpu.Layout.WGMMA)


def _run_row(
    call: Call, gmem: Operands, smem: Shared, part: Part, group: int, segment: Segment, carry: tuple
) -> tuple:
    """Attends to one row's blocks. carry: blocks done so far in this part, and where the next load is."""
    plgpu.barrier_wait(smem.q_loaded.at[group])
    _, rows = share(call, group)
    softmax = (
        plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), BY_ROW),
        plgpu.layout_cast(jnp.zeros((BLOCK, rows), jnp.float32), plgpu.Layout.WGMMA),
        _zeros(call),
    )

    def attend(block: Array, carry: tuple) -> tuple:
        step, cursor, softmax = carry
        slot = lax.rem(step, jnp.int32(call.stages))
        plgpu.barrier_wait(smem.loaded.at[2 * slot + group])
        load = functools.partial(_load_block, call, gmem, smem, part, cursor, group, slot)
        softmax = _attend_block(call, gmem, smem, group, segment, block, slot, Softmax(*softmax), load)
        return step + 1, advance(call, gmem, part, cursor), tuple(softmax)

    carry = lax.fori_loop(segment.begin_block, segment.end_block, attend, (*carry, softmax))
    _finish_row(call, gmem, smem, part, group, segment, Softmax(*carry[2]))
    return carry[:2]


def _load_queries(call: Call, gmem: Operands, smem: Shared, part: Part, cursor: Cursor, group: int) -> None:
    """Starts the load of this warpgroup's columns of the queries of the cursor's row, if this part works on it."""

    @pl.when(is_wanted(part, cursor))
    def _load() -> None:
        rows = tile_rows(call)
        for source, target in ((gmem.q_latent, smem.q_latent), (gmem.q_rope, smem.q_rope)):
            columns = _columns(target, group)
            plgpu.copy_gmem_to_smem(source.at[cursor.row, rows, columns], target.at[group], smem.q_loaded.at[group])


def _columns(target: Any, group: int) -> Any:
    """The warpgroup's columns in global memory of what `target` holds the halves of."""
    width = target.shape[-1]
    return pl.ds(group * width, width)


def _load_block(
    call: Call, gmem: Operands, smem: Shared, part: Part, cursor: Cursor, group: int, slot: Array
) -> None:
    """Starts the loads of this warpgroup's columns of the cursor's block, if this part has it."""
    latent = smem.fp8 if call.quantised else smem.latent
    loaded = smem.loaded.at[2 * slot + group]

    @pl.when(is_wanted(part, cursor))
    def _load() -> None:
        for load, page in enumerate(pages(call, gmem, cursor)):
            rows = pl.ds(load * call.load_rows, call.load_rows)
            for source, target in ((gmem.latent_pool, latent), (gmem.rope_pool, smem.rope)):
                columns = _columns(target, group)
                plgpu.copy_gmem_to_smem(source.at[page, :, columns], target.at[slot, group, rows], loaded)
            for i in range(NUM_SCALES if call.quantised else 0):
                piece = lax.rem(page, jnp.int32(call.pieces))
                source = gmem.scale_pool.at[lax.div(page, jnp.int32(call.pieces)), group * NUM_SCALES + i, piece]
                plgpu.copy_gmem_to_smem(source, smem.scale.at[slot, group, i, rows], loaded)


def _attend_block(
    call: Call,
    gmem: Operands,
    smem: Shared,
    group: int,
    segment: Segment,
    block: Array,
    slot: Array,
    softmax: Softmax,
    load_next: Callable[[], None],
) -> Softmax:
    """Adds a block to the running softmax. Both warpgroups pass here together."""
    position = block * BLOCK
    masked = is_masked(call, segment, position, BLOCK)
    place = slot
    if call.quantised:
        place = hidden_zero(block)
        _convert(smem, group, slot, place)
    scores = _scores(call, gmem, smem, group, segment, block, place, slot)
    if call.quantised:
        load_next()
    scores = lax.cond(
        masked,
        lambda s: jnp.where(_seen(call, gmem, segment, position, group), s, -jnp.inf),
        lambda s: s,
        scores,
    )
    maximum = jnp.maximum(softmax.maximum, scores.max(axis=0))
    shift = jnp.where(maximum == -jnp.inf, 0.0, maximum)  # nothing seen yet: avoid -inf minus -inf
    rescale = jnp.exp2(softmax.maximum - shift)
    weights = jnp.exp2(scores - _along(shift, scores))
    total = softmax.total * _along(rescale, scores) + weights
    rows = pl.ds(*share(call, group))
    smem.rescale.at[rows][...] = rescale
    smem.weights.at[rows].transpose((1, 0))[...] = weights.astype(smem.weights.dtype)
    pl.when(masked)(lambda: clear_unseen(smem.latent.at[place, group], segment, position))
    plgpu.commit_smem()
    compat.synchronise(smem.pair)  # all weights are there
    weighted = softmax.weighted * _along(_row_vector(smem.rescale), softmax.weighted)
    weighted = _weigh(call, smem, group, place, weighted)
    if not call.quantised:
        load_next()
    return Softmax(maximum, total, weighted)


def _along(vector: Array, like: Array) -> Array:
    """A vector along the second side of `like`."""
    return lax.broadcast_in_dim(vector, like.shape, [1])


def _row_vector(ref: Any) -> Array:
    return plgpu.load(ref, layout=BY_ROW, optimized=False)


def _scores(
    call: Call, gmem: Operands, smem: Shared, group: int, segment: Segment, block: Array, place: Array, slot: Array
) -> Float[Array, "64 share"]:
    """The block's scores of this warpgroup's share of the rows, in log2 units."""
    queries = hidden_zero(block) + group

    def issue(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, smem.latent.at[place, group], smem.q_latent.at[queries].transpose((1, 0)))
        plgpu.wgmma(accumulator, smem.rope.at[slot, group], smem.q_rope.at[queries].transpose((1, 0)))

    half = compat.product(issue, (BLOCK, call.row_tile))  # over this warpgroup's columns
    (own, num_own), (other, num_other) = share(call, group), share(call, 1 - group)
    smem.scores.at[:, pl.ds(other, num_other)][...] = half[:, other : other + num_other]
    compat.synchronise(smem.pair)  # all scores are there
    scores = half[:, own : own + num_own] + plgpu.load(
        smem.scores.at[:, pl.ds(own, num_own)], layout=plgpu.Layout.WGMMA
    )
    scores = scores * call.log2_scale
    if not call.quantised:
        return scores
    rows = pl.ds(call.tile() * call.row_tile + own, num_own)
    return scores * _along(_row_vector(gmem.q_scale.at[segment.row, rows]), scores)


def _weigh(
    call: Call, smem: Shared, group: int, place: Array, weighted: Float[Array, "256 n"]
) -> Float[Array, "256 n"]:
    """weighted + this warpgroup's latent columns^T @ weights^T."""

    def issue(accumulator: Any) -> None:
        columns = smem.latent.at[place, group].transpose((1, 0))
        plgpu.wgmma(accumulator, columns, smem.weights.transpose((1, 0)))

    return compat.accumulate(weighted, issue, interpreted=call.interpret is not None)


def _convert(smem: Shared, group: int, slot: Array, place: Array) -> None:
    """This warpgroup's FP8 latents to float16, times their scales."""
    layout = plgpu.Layout.WGMMA_8BIT
    for i in range(NUM_SCALES):
        columns = pl.ds(i * SCALE_COLUMNS, SCALE_COLUMNS)
        scale = plgpu.load(smem.scale.at[slot, group, i], layout=layout.reduce(1), optimized=False)
        latent = plgpu.load(smem.fp8.at[slot, group, :, columns], layout=layout).astype(jnp.float16)
        scale = lax.broadcast_in_dim(scale.astype(jnp.float16), latent.shape, [0])
        smem.latent.at[place, group, :, columns][...] = latent * scale
    plgpu.commit_smem()


def _seen(call: Call, gmem: Operands, segment: Segment, position: Array, group: int) -> Array:
    """Which of this warpgroup's rows see which of the positions from `position` on, bool [64, share]."""
    first, rows = share(call, group)
    shape = (BLOCK, rows)
    position = position + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    row = first + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    tree = row_mask(call, gmem, segment.row, first, rows, BY_ROW)
    if tree is not None:
        tree = tuple(lax.broadcast_in_dim(word, shape, [1]) for word in tree)
    return seen(call, segment, row, position, tree)


def _finish_row(
    call: Call, gmem: Operands, smem: Shared, part: Part, group: int, segment: Segment, softmax: Softmax
) -> None:
    """Normalises and writes a row: to the output when nobody else has a share of it, else to this part's slot."""
    first, rows = share(call, group)
    total = softmax.total.sum(axis=0)
    compat.synchronise(smem.pair)  # the last block's factors are used up
    smem.rescale.at[pl.ds(first, rows)][...] = total
    compat.synchronise(smem.pair)  # all sums are there, and the queries are used up
    following = cursor_at(call, gmem, part, gmem.rows[segment.row, 2])
    _load_queries(call, gmem, smem, part, following, group)
    divisor = _row_vector(smem.rescale)
    divisor = jnp.where(divisor > 0, divisor, 1.0)
    result = softmax.weighted / _along(divisor, softmax.weighted)
    if call.whole:
        _store(call, gmem.out.at[segment.row], group, result)
        return
    pl.when(segment.whole)(lambda: _store(call, gmem.out.at[segment.row], group, result))

    @pl.when(jnp.logical_not(segment.whole))
    def _store_partial() -> None:
        slot = 2 * lax.axis_index("part") + segment.starts_row.astype(jnp.int32)
        _store(call, gmem.partial.at[slot], group, result)
        log_sum = jnp.where(total > 0, softmax.maximum + jnp.log2(jnp.where(total > 0, total, 1.0)), -jnp.inf)
        place = pl.ds(call.tile() * call.row_tile + first, rows)
        compat.store_global(gmem.log_sum.at[slot, place], log_sum)


def _store(call: Call, ref: Any, group: int, result: Float[Array, "256 n"]) -> None:
    """Writes this warpgroup's columns of the tile's rows."""
    columns = pl.ds(group * HALF, HALF)
    place = ref.at[tile_rows(call), columns].transpose((1, 0))
    compat.store_global(place, plgpu.layout_cast(result.astype(ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED))
