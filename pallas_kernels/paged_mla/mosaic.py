"""Mosaic GPU kernel for sm_90: decode and verification attention over a paged latent cache.

Follows FlashMLA (csrc/sm90/decode/dense): a row tile is 64 rows of (query token, head), and each part of the GPU
works through its run of rows and blocks of 64 positions (`splits.py`). Two warpgroups share a block: each scores half
of its positions; they exchange row maxima and weights through shared memory, and each accumulates half of the latent
columns for all positions.

Departures: the exchange happens within one block instead of across a pair, so that a ring of two blocks is enough for
loads to overlap with compute. And there is no producer warpgroup: the first warpgroup starts the TMA loads. Three
warpgroups leave 168 registers a thread, which `setmaxnreg` would have to shift from the producer; JAX assembles
Mosaic kernels with nvJitLink where it finds that library, and nvJitLink ignores `setmaxnreg` (ptxas message C7504): a
thousand bytes of spills, and wgmma one at a time. Two warpgroups may use 255 registers without asking.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels import compat
from pallas_kernels.paged_mla.splits import BLOCK_TOKENS, Splits, make_splits, row_blocks
from pallas_kernels.paged_mla.tuning import NUM_SMS, tile_config

ROWS = 64  # rows of a tile: wgmma's one M
LATENT, ROPE = 512, 64
HALF = LATENT // 2  # latent columns of a warpgroup
SHARE = BLOCK_TOKENS // 2  # positions a warpgroup scores
ROW_VECTOR = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call. `stages`: blocks the ring holds; `scale` multiplies the scores."""

    batch: int
    num_queries: int
    heads: int
    num_pages: int
    page_size: int
    columns: int
    num_parts: int
    scale: float
    first: int
    stages: int
    interpret: Any = None

    @property
    def tiles(self) -> int:
        """Row tiles of a batch row."""
        return -(-self.num_queries * self.heads // ROWS)

    @property
    def load_rows(self) -> int:
        """Slots of one TMA load: a page, or as much of it as a block holds."""
        return min(self.page_size, BLOCK_TOKENS)


class Operands(NamedTuple):
    """Refs in GMEM, in the order the kernel gets them. Pools are cut into pieces of `load_rows` slots."""

    q_latent: Any  # [b, tiles * 64, 512]
    q_rope: Any  # [b, tiles * 64, 64]
    latent_pool: Any  # [n * p * pieces, load_rows, 512]
    rope_pool: Any  # [n * p * pieces, load_rows, 64]
    layer: Any  # [1]
    page_ids: Any  # [b, m]
    start: Any  # [b]
    length: Any  # [b]
    parts: Any  # [parts, 4]
    rows: Any  # [b, 3]
    out: Any  # [b, tiles * 64, 512]: rows that one part did alone
    partial: Any  # [2 * parts, tiles * 64, 512] f32: the others, normalised by their own sum
    log_sum: Any  # [2 * parts, tiles * 64] f32: log2 of that sum


class Shared(NamedTuple):
    """Shared memory and barriers, by the kernel's scratch names."""

    q_latent: Any
    q_rope: Any
    latent: Any  # [stages, 64, 512]
    rope: Any  # [stages, 64, 64]
    weights: Any  # [2, 64, 32]: softmax weights of a block, by warpgroup
    row_max: Any  # [2, 64]: what the warpgroups tell each other of a row in every block
    row_sum: Any  # [2, 64]: and at its end. Apart: one may be a row ahead while the other still reads this
    loaded: Any  # of each block of the ring
    q_loaded: Any
    released: Any  # the second warpgroup is done with a block
    pair: Any  # both warpgroups are here


class Part(NamedTuple):
    """This part's line of `Splits.parts`."""

    first_row: Array
    from_block: Array
    last_row: Array
    to_block: Array


class Segment(NamedTuple):
    """One row's work in a part. Blocks count from position 0 here; `end` is the number of positions in use."""

    row: Array
    start: Array
    end: Array
    begin_block: Array
    end_block: Array
    whole: Array  # no other part has a share of the row


class Softmax(NamedTuple):
    """Running softmax of a warpgroup: maxima in log2 units, the sum over its own positions, its columns."""

    maximum: Array
    total: Array
    weighted: Array


def scratch_types(call: Call) -> dict[str, Any]:
    """Shared memory of a block of threads: 231,472 bytes with two stages, of the 232,448 an H200 has."""
    loads = BLOCK_TOKENS // call.load_rows
    return {
        "q_latent": compat.swizzled_tile((ROWS, LATENT), jnp.bfloat16),
        "q_rope": compat.swizzled_tile((ROWS, ROPE), jnp.bfloat16),
        "latent": compat.swizzled_tile((call.stages, BLOCK_TOKENS, LATENT), jnp.bfloat16),
        "rope": compat.swizzled_tile((call.stages, BLOCK_TOKENS, ROPE), jnp.bfloat16),
        "weights": compat.swizzled_tile((2, ROWS, SHARE), jnp.bfloat16, SHARE),
        "row_max": plgpu.SMEM((2, ROWS), jnp.float32),
        "row_sum": plgpu.SMEM((2, ROWS), jnp.float32),
        "loaded": plgpu.Barrier(num_barriers=call.stages, num_arrivals=2 * loads),
        "q_loaded": plgpu.Barrier(num_arrivals=2),
        "released": plgpu.Barrier(),
        "pair": plgpu.Barrier(num_arrivals=2),
    }


def attention_body(call: Call, *refs: Any, **scratch: Any) -> None:
    """One part's work on one row tile."""
    gmem, smem = Operands(*refs), Shared(**scratch)
    index = lax.axis_index("part")
    part = Part(*(gmem.parts[index, i] for i in range(4)))
    for group in range(2):  # unrolled: slices of swizzled memory have static places
        pl.when(lax.axis_index("warpgroup") == group)(lambda group=group: _run_part(call, gmem, smem, part, group))


def _segment(call: Call, gmem: Operands, part: Part, row: Array) -> Segment:
    start, length = gmem.start[row], gmem.length[row]
    blocks = row_blocks(start, length, call.first)
    begin = jnp.where(row == part.first_row, part.from_block, 0)
    end = jnp.where(row == part.last_row, jnp.minimum(part.to_block, blocks), blocks)
    offset = call.first // BLOCK_TOKENS
    return Segment(row, start, start + length, begin + offset, end + offset, (begin == 0) & (end == blocks))


def _run_part(call: Call, gmem: Operands, smem: Shared, part: Part, group: int) -> None:
    cursor = _start_part(call, gmem, smem, part, group)

    def visit(row: Array, carry: tuple) -> tuple:
        segment = _segment(call, gmem, part, row)
        some = segment.begin_block < segment.end_block
        return lax.cond(some, lambda c: _run_row(call, gmem, smem, part, group, segment, c), lambda c: c, carry)

    lax.fori_loop(part.first_row, part.last_row + 1, visit, (jnp.int32(0), cursor))


def _run_row(
    call: Call, gmem: Operands, smem: Shared, part: Part, group: int, segment: Segment, carry: tuple
) -> tuple:
    """Attends to one row's blocks. carry: blocks done so far in this part, and where the next load is."""
    plgpu.barrier_wait(smem.q_loaded)
    softmax = (
        plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW_VECTOR),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW_VECTOR),
        plgpu.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), plgpu.Layout.WGMMA),
    )

    def attend(block: Array, carry: tuple) -> tuple:
        step, cursor, softmax = carry
        slot = lax.rem(step, jnp.int32(call.stages))
        pages = _pages(call, gmem, cursor) if group == 0 else ()  # read early: they are needed at the end
        plgpu.barrier_wait(smem.loaded.at[slot])
        softmax = _attend_block(call, smem, group, segment, block, slot, Softmax(*softmax))
        if group == 1:
            plgpu.barrier_arrive(smem.released)
            return step + 1, cursor, tuple(softmax)
        plgpu.barrier_wait(smem.released)
        _load_block(call, gmem, smem, part, cursor, pages, slot)
        return step + 1, _advance(call, gmem, part, cursor), tuple(softmax)

    carry = lax.fori_loop(segment.begin_block, segment.end_block, attend, (*carry, softmax))
    _finish_row(call, gmem, smem, part, group, segment, Softmax(*carry[2]))
    return carry[:2]


class Cursor(NamedTuple):
    """The next block to load: ahead of the one in use by the ring's size, also into the next row."""

    row: Array
    block: Array
    end_block: Array
    last_column: Array  # of the row in the page table


def _cursor(call: Call, gmem: Operands, part: Part, row: Array) -> Cursor:
    segment = _segment(call, gmem, part, jnp.minimum(row, call.batch - 1))
    last_column = lax.div(segment.end - 1, jnp.int32(call.page_size))
    return Cursor(row, segment.begin_block, segment.end_block, last_column)


def _advance(call: Call, gmem: Operands, part: Part, cursor: Cursor) -> Cursor:
    """The block after, in this row or the next one with work; `call.batch` stands for no such row."""

    def next_row(cursor: Cursor) -> Cursor:
        return _cursor(call, gmem, part, gmem.rows[jnp.minimum(cursor.row, call.batch - 1), 2])

    cursor = cursor._replace(block=cursor.block + 1)
    return lax.cond(cursor.block < cursor.end_block, lambda c: c, next_row, cursor)


def _start_part(call: Call, gmem: Operands, smem: Shared, part: Part, group: int) -> Cursor:
    """Fills the ring and brings the first row's queries."""
    cursor = _cursor(call, gmem, part, part.first_row)
    if group == 0:
        _load_queries(gmem, smem, part, part.first_row)
        for slot in range(call.stages):
            _load_block(call, gmem, smem, part, cursor, _pages(call, gmem, cursor), slot)
            cursor = _advance(call, gmem, part, cursor)
    return cursor


def _load_queries(gmem: Operands, smem: Shared, part: Part, row: Array) -> None:
    @pl.when(row <= part.last_row)
    def _load() -> None:
        tile = pl.ds(lax.axis_index("tile") * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(gmem.q_latent.at[row, tile], smem.q_latent, smem.q_loaded)
        plgpu.copy_gmem_to_smem(gmem.q_rope.at[row, tile], smem.q_rope, smem.q_loaded)


def _pages(call: Call, gmem: Operands, cursor: Cursor) -> tuple[Array, ...]:
    """Where the pieces of a block lie in the pools.

    Pieces outside the row's pages repeat one inside, since the table's other entries may be anything.
    """
    row = jnp.minimum(cursor.row, call.batch - 1)
    pieces = call.page_size // call.load_rows  # of a page; 1 up to pages of 64
    piece = lax.rem(cursor.block, jnp.int32(pieces))
    found = []
    for load in range(BLOCK_TOKENS // call.load_rows):
        column = lax.div(cursor.block * BLOCK_TOKENS + load * call.load_rows, jnp.int32(call.page_size))
        column = jnp.maximum(jnp.minimum(column, cursor.last_column), call.first // call.page_size)
        page = gmem.page_ids[row, jnp.minimum(column, call.columns - 1)]
        found.append((gmem.layer[0] * call.num_pages + page) * pieces + piece)
    return tuple(found)


def _load_block(
    call: Call, gmem: Operands, smem: Shared, part: Part, cursor: Cursor, pages: tuple, slot: Array | int
) -> None:
    """Starts the loads of the cursor's block, if this part has it."""

    @pl.when(cursor.row <= part.last_row)
    def _load() -> None:
        for load, page in enumerate(pages):
            rows = pl.ds(load * call.load_rows, call.load_rows)
            plgpu.copy_gmem_to_smem(gmem.latent_pool.at[page], smem.latent.at[slot, rows], smem.loaded.at[slot])
            plgpu.copy_gmem_to_smem(gmem.rope_pool.at[page], smem.rope.at[slot, rows], smem.loaded.at[slot])


def _attend_block(
    call: Call, smem: Shared, group: int, segment: Segment, block: Array, slot: Array, softmax: Softmax
) -> Softmax:
    """Adds a block to the running softmax. Both warpgroups pass here together."""
    position = block * BLOCK_TOKENS
    # Blocks before the tail are seen by every query; so is all after the block in which `first` lies.
    masked = (position + (BLOCK_TOKENS - 1) > segment.start) | (position < call.first)
    scores = _scores(smem, group, slot)
    scores = lax.cond(
        masked,
        lambda s: jnp.where(_seen(call, segment, position + group * SHARE), s, -jnp.inf),
        lambda s: s,
        scores,
    )
    log2_scale = call.scale * np.log2(np.e)
    smem.row_max.at[group][...] = scores.max(axis=1) * log2_scale
    compat.synchronise(smem.pair)  # both have scored: maxima are there, and latents may be overwritten
    maximum = jnp.maximum(softmax.maximum, jnp.maximum(_row_vector(smem.row_max, 0), _row_vector(smem.row_max, 1)))
    shift = jnp.where(maximum == -jnp.inf, 0.0, maximum)  # nothing seen yet: avoid -inf minus -inf
    rescale = jnp.exp2(softmax.maximum - shift)
    weights = jnp.exp2(scores * log2_scale - lax.broadcast_in_dim(shift, scores.shape, [0]))
    total = softmax.total * rescale + weights.sum(axis=1)
    rounded = weights.astype(jnp.bfloat16)
    smem.weights.at[group][...] = rounded
    pl.when(masked)(lambda: _clear_unseen(call, smem, group, segment, position, slot))
    plgpu.commit_smem()
    compat.synchronise(smem.pair)  # both halves of the weights are there
    weighted = softmax.weighted * lax.broadcast_in_dim(rescale, softmax.weighted.shape, [0])
    return Softmax(maximum, total, _weigh(call, smem, group, slot, rounded, weighted))


def _scores(smem: Shared, group: int, slot: Array) -> Float[Array, "64 32"]:
    """All rows against this warpgroup's positions of the block, unscaled."""
    positions = pl.ds(group * SHARE, SHARE)

    def issue(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, smem.q_latent, smem.latent.at[slot, positions].transpose((1, 0)))
        plgpu.wgmma(accumulator, smem.q_rope, smem.rope.at[slot, positions].transpose((1, 0)))

    return compat.product(issue, (ROWS, SHARE))


def _weigh(call: Call, smem: Shared, group: int, slot: Array, own: Array, weighted: Array) -> Float[Array, "64 256"]:
    """weighted + weights @ this warpgroup's latent columns. Its own half of the weights is in registers already."""
    columns = pl.ds(group * HALF, HALF)

    def issue(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, weights, smem.latent.at[slot, :, columns])

    def issue_interpreted(accumulator: Any) -> None:
        # The interpreter's wgmma takes both operands from shared memory; the hardware's takes 64 columns at least.
        for half in range(2):
            positions = pl.ds(half * SHARE, SHARE)
            plgpu.wgmma(accumulator, smem.weights.at[half], smem.latent.at[slot, positions, columns])

    if call.interpret is not None:
        return compat.accumulate(weighted, issue_interpreted, interpreted=True)
    halves = [own, plgpu.load(smem.weights.at[1 - group], layout=plgpu.Layout.WGMMA)]
    weights = jnp.concatenate(halves if group == 0 else halves[::-1], axis=1)
    return compat.accumulate(weighted, issue, interpreted=False)


def _seen(call: Call, segment: Segment, position: Array) -> Array:
    """Which of the positions from `position` on each row of the tile may see, bool [64, 32]."""
    shape = (ROWS, SHARE)
    row = lax.axis_index("tile") * ROWS + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    last = jnp.minimum(segment.start + lax.div(row, jnp.int32(call.heads)), segment.end - 1)
    position = position + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    return (position <= last) & (position >= call.first)


def _clear_unseen(call: Call, smem: Shared, group: int, segment: Segment, position: Array, slot: Array) -> None:
    """Zeroes this warpgroup's latent columns where no query looks: a weight of 0 times NaN would still be NaN."""
    shape = (BLOCK_TOKENS, 64)  # 64 columns at a time: few registers
    position = position + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    keep = (position < segment.end) & (position >= call.first)
    for column in range(group * HALF, (group + 1) * HALF, shape[1]):
        part = smem.latent.at[slot, :, pl.ds(column, shape[1])]
        values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where(keep, values, jnp.zeros((), jnp.bfloat16))


def _row_vector(ref: Any, index: Any) -> Float[Array, "64"]:
    return plgpu.load(ref.at[index], layout=ROW_VECTOR, optimized=False)


def _finish_row(
    call: Call, gmem: Operands, smem: Shared, part: Part, group: int, segment: Segment, softmax: Softmax
) -> None:
    """Normalises and writes a row: to the output when nobody else has a share of it, else to this part's slot."""
    smem.row_sum.at[group][...] = softmax.total
    compat.synchronise(smem.pair)  # sums are there, and the queries are used up
    if group == 0:
        _load_queries(gmem, smem, part, gmem.rows[segment.row, 2])
    total = _row_vector(smem.row_sum, 0) + _row_vector(smem.row_sum, 1)
    divisor = jnp.where(total > 0, total, 1.0)
    result = softmax.weighted / lax.broadcast_in_dim(divisor, softmax.weighted.shape, [0])
    rows, columns = pl.ds(lax.axis_index("tile") * ROWS, ROWS), pl.ds(group * HALF, HALF)
    starts_here = segment.begin_block == call.first // BLOCK_TOKENS

    @pl.when(segment.whole)
    def _store() -> None:
        out = gmem.out.at[segment.row, rows, columns]
        compat.store_global(out, result.astype(jnp.bfloat16))

    @pl.when(jnp.logical_not(segment.whole))
    def _store_partial() -> None:
        slot = 2 * lax.axis_index("part") + starts_here.astype(jnp.int32)
        compat.store_global(gmem.partial.at[slot, rows, columns], result)
        if group == 0:
            log_sum = jnp.where(total > 0, softmax.maximum + jnp.log2(divisor), -jnp.inf)
            compat.store_global(gmem.log_sum.at[slot, rows], log_sum)


def combine_body(call: Call, partial: Any, log_sum: Any, rows: Any, out: Any) -> None:
    """Puts 64 columns of a row together from the parts that shared it.

    Leaves rows that one part did alone, and zeroes those without work.
    """
    row, columns = lax.axis_index("row"), pl.ds(lax.axis_index("column") * 64, 64)
    tile = pl.ds(lax.axis_index("tile") * ROWS, ROWS)
    first_part, last_part = rows[row, 0], rows[row, 1]
    place = out.at[row, tile, columns]

    def visit(part: Array, carry: tuple) -> tuple:
        maximum, total, weighted = carry
        slot = 2 * part + (part == first_part).astype(jnp.int32)
        log = plgpu.load(log_sum.at[slot, tile], layout=ROW_VECTOR, optimized=False)
        new_maximum = jnp.maximum(maximum, log)
        shift = jnp.where(new_maximum == -jnp.inf, 0.0, new_maximum)
        rescale, weight = jnp.exp2(maximum - shift), jnp.exp2(log - shift)
        values = plgpu.load(partial.at[slot, tile, columns], layout=plgpu.Layout.WGMMA, optimized=False)
        weighted = weighted * lax.broadcast_in_dim(rescale, values.shape, [0])
        weighted += values * lax.broadcast_in_dim(weight, values.shape, [0])
        return new_maximum, total * rescale + weight, weighted

    @pl.when(last_part > first_part)
    def _combine() -> None:
        carry = (
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW_VECTOR),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW_VECTOR),
            plgpu.layout_cast(jnp.zeros((ROWS, 64), jnp.float32), plgpu.Layout.WGMMA),
        )
        _, total, weighted = lax.fori_loop(first_part, last_part + 1, visit, carry)
        result = weighted / lax.broadcast_in_dim(jnp.where(total > 0, total, 1.0), weighted.shape, [0])
        compat.store_global(place, result.astype(jnp.bfloat16))

    @pl.when(last_part < first_part)
    def _no_work() -> None:
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, 64), jnp.bfloat16), plgpu.Layout.WGMMA)
        compat.store_global(place, zeros)


def paged_mla_mosaic(
    q_latent: BFloat16[Array, "b t h 512"],
    q_rope: BFloat16[Array, "b t h 64"],
    latent_pool: BFloat16[Array, "n p s 512"],
    rope_pool: BFloat16[Array, "n p s 64"],
    layer: Int[Array, ""],
    page_ids: Int[Array, "b m"],
    start: Int[Array, "b"],
    length: Int[Array, "b"],
    scale: float,
    first: int = 0,
    splits: Splits | None = None,
    interpret: Any = None,
) -> BFloat16[Array, "b t h 512"]:
    """`paged_mla` as two kernels: the parts of `splits`, then the rows that several parts shared.

    Args:
        splits: of the same start, length and first; made here when not given.
        interpret: `compat.interpret_params()` to run on the CPU.
        q_latent, q_rope, latent_pool, rope_pool, layer, page_ids, start, length, scale, first: as in `paged_mla`.

    Raises:
        NotImplementedError: `unsupported` says why.
    """
    if reason := unsupported(q_latent, q_rope, latent_pool, rope_pool):
        raise NotImplementedError(f"the Mosaic backend of paged_mla cannot: {reason}")
    batch, num_queries, heads, _ = q_latent.shape
    layers, num_pages, page_size, _ = latent_pool.shape
    config = tile_config(num_queries * heads, page_size, str(latent_pool.dtype))
    if splits is None:
        splits = make_splits(start, length, default_parts(num_queries * heads), first)
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
        stages=config.stages,
        interpret=interpret,
    )
    pieces = layers * num_pages * (page_size // call.load_rows)
    operands = (
        _packed(q_latent, call),
        _packed(q_rope, call),
        latent_pool.reshape(pieces, call.load_rows, LATENT),
        rope_pool.reshape(pieces, call.load_rows, ROPE),
        layer.astype(jnp.int32)[None],
        *(x.astype(jnp.int32) for x in (page_ids, start, length, *splits)),
    )
    out, partial, log_sum = _attention_kernel(call)(*operands)
    out = jax.new_ref(out)
    _combine_kernel(call)(partial, log_sum, splits.rows.astype(jnp.int32), out)
    return jax.freeze(out)[:, : num_queries * heads].reshape(q_latent.shape)


def unsupported(q_latent: Array, q_rope: Array, latent_pool: Array, rope_pool: Array) -> str | None:
    """Why the kernel cannot take these arrays, or None if it can."""
    dtypes = [str(x.dtype) for x in (q_latent, q_rope, latent_pool, rope_pool)]
    if set(dtypes) != {"bfloat16"}:
        return f"queries and pools must be bfloat16: got {', '.join(dtypes)}"
    widths = (latent_pool.shape[-1], rope_pool.shape[-1])
    if widths != (LATENT, ROPE):
        return f"the pools must be {(LATENT, ROPE)} wide: got {widths}"
    rows, page_size = q_latent.shape[1] * q_latent.shape[2], latent_pool.shape[2]
    if tile_config(rows, page_size, dtypes[2]) is None:
        return f"there is no tile for {rows} rows (query tokens * heads) and pages of {page_size}"
    return None


def default_parts(rows: int) -> int:
    """Parts of a call with that many rows (query tokens * heads): one for each multiprocessor and row tile."""
    return max(NUM_SMS // -(-rows // ROWS), 1)


def _packed(queries: Array, call: Call) -> Array:
    """[b, t, h, c] as rows of (query, head), padded to whole tiles."""
    rows = queries.reshape(call.batch, call.num_queries * call.heads, queries.shape[-1])
    return jnp.pad(rows, ((0, 0), (0, call.tiles * ROWS - rows.shape[1]), (0, 0)))


def _attention_kernel(call: Call) -> Any:
    slots, rows = 2 * call.num_parts, call.tiles * ROWS
    return compat.gpu_kernel(
        lambda *refs, **scratch: attention_body(call, *refs, **scratch),
        name="paged_mla",
        out_type=(
            jax.ShapeDtypeStruct((call.batch, rows, LATENT), jnp.bfloat16),
            jax.ShapeDtypeStruct((slots, rows, LATENT), jnp.float32),
            jax.ShapeDtypeStruct((slots, rows), jnp.float32),
        ),
        grid={"part": call.num_parts, "tile": call.tiles},
        scratch=scratch_types(call),
        warpgroups=2,
        interpret=call.interpret,
    )


def _combine_kernel(call: Call) -> Any:
    return compat.gpu_kernel(
        lambda *refs: combine_body(call, *refs),
        name="paged_mla_combine",
        out_type=(),
        grid={"row": call.batch, "tile": call.tiles, "column": LATENT // 64},
        scratch={},
        interpret=call.interpret,
    )
