"""Mosaic GPU kernel for row tiles of 64 rows, where the tensor cores are the limit: it is to keep them busy.

After FlashMLA (csrc/sm90/decode/dense and its deep dive of April 2025): a step is a pair of blocks of 64 positions.
Each of two warpgroups scores one block of the pair with all columns, and accumulates half of the latent columns for
both blocks, so each needs the other's weights. The first leads, the second follows: while one finds weights, the
other keeps the tensor cores busy.

Each half of each block has one place in shared memory. The warpgroup that accumulates the half loads the next one
into it as soon as it is done; all that the other wants of it are its scores, and these are done when its weights
arrive. So no barrier says that a place is free.

Departures. Both warpgroups take the blocks in order, and the second finds its weights while it multiplies the
first's: FlashMLA's second multiplies its own first, and the first corrects its weights for it. FlashMLA keeps weights
for the other apart, for which part of the queries must be in registers: here they go where the block's rotary keys
were. There is no producer warpgroup: three leave 168 registers a thread, which `setmaxnreg` would have to shift, and
nvJitLink, with which JAX assembles where it finds it, ignores that (C7504).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import compat
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

ROWS = 64  # of a tile: wgmma's one M
BLOCK = 64  # positions that a warpgroup scores at a time; a step is two
LEADER, FOLLOWER = 0, 1
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
NOTHING_SEEN = -1e30  # a maximum to start from: finite, so that it can be subtracted
REDUCTION_BYTES = 0  # maxima and sums of a row stay within a quad of threads


class Shared(NamedTuple):
    """Shared memory and barriers, by the kernel's scratch names."""

    q_latent: Any  # [2, 64, 256]: by halves of the columns
    q_rope: Any  # [64, 64]
    latent: Any  # [2 * 2, 64, 256]: the blocks of a pair, likewise
    rope: Any  # [2, 64, 64]: and their rotary keys; once a block is scored, its weights for the other warpgroup
    row_max: Any  # [2, 64]: running maxima, with each block
    row_sum: Any  # [2, 64]: at a row's end, of each warpgroup's weights
    q_loaded: Any
    own: Any  # [2]: the half that the warpgroup which scores the block has loaded
    crossed: Any  # [2]: the half that the other has, and the rotary keys
    weighed: Any  # [2]: a block is scored, and its maxima and weights are there
    finished: Any  # both sums are there
    staged: Any = None  # [2, 64, 64]: a block's weights for its own warpgroup; in registers unless interpreted


class Softmax(NamedTuple):
    """Running softmax of a warpgroup: maxima in log2 units, the sum over its blocks, its columns of the result."""

    maximum: Float[Array, "64"]
    total: Float[Array, "64"]
    weighted: Float[Array, "64 256"]


def scratch_types(call: Call) -> dict[str, Any]:
    """Shared memory of a block of threads: 222,208 bytes and the barriers, of the 232,448 an H200 has."""
    loads = BLOCK // call.load_rows
    types = {
        "q_latent": compat.swizzled_tile((2, ROWS, HALF), jnp.bfloat16),
        "q_rope": compat.swizzled_tile((ROWS, ROPE), jnp.bfloat16),
        "latent": compat.swizzled_tile((4, BLOCK, HALF), jnp.bfloat16),
        "rope": compat.swizzled_tile((2, BLOCK, ROPE), jnp.bfloat16),
        "row_max": plgpu.SMEM((2, ROWS), jnp.float32),
        "row_sum": plgpu.SMEM((2, ROWS), jnp.float32),
        "q_loaded": plgpu.Barrier(num_arrivals=3),
        "own": plgpu.Barrier(num_barriers=2, num_arrivals=loads),
        "crossed": plgpu.Barrier(num_barriers=2, num_arrivals=2 * loads),
        "weighed": plgpu.Barrier(num_barriers=2),
        "finished": plgpu.Barrier(num_arrivals=2),
    }
    if call.interpret is not None:
        types["staged"] = compat.swizzled_tile((2, ROWS, BLOCK), jnp.bfloat16)
    return types


def attention_body(call: Call, gmem: Operands, **scratch: Any) -> None:
    """One part's work on one row tile."""
    smem = Shared(**scratch)
    part = this_part(gmem)
    for group in (LEADER, FOLLOWER):  # unrolled: slices of swizzled memory have static places
        pl.when(lax.axis_index("warpgroup") == group)(lambda group=group: _run_part(call, gmem, smem, part, group))


def _run_part(call: Call, gmem: Operands, smem: Shared, part: Part, group: int) -> None:
    cursor = cursor_at(call, gmem, part, part.first_row)
    if group == LEADER:
        _load_queries(call, gmem, smem, part, cursor)
    places = pages(call, gmem, cursor)
    _load_own(call, gmem, smem, part, cursor, places, group)
    _load_crossed(call, gmem, smem, part, cursor, places, group)
    cursor = advance(call, gmem, part, cursor)

    def store_zeros(row: Array) -> None:
        _store(call, gmem.out.at[row], group, _zeros())

    def run(here: Segment, cursor: Cursor) -> Cursor:
        return _run_row(call, gmem, smem, part, group, here, cursor)

    visit_rows(call, gmem, part, run, store_zeros, cursor)


def _run_row(
    call: Call, gmem: Operands, smem: Shared, part: Part, group: int, segment: Segment, cursor: Cursor
) -> Cursor:
    """Attends to one row's pairs of blocks. `cursor`: the next pair to load."""
    plgpu.barrier_wait(smem.q_loaded)
    attend = _lead if group == LEADER else _follow
    softmax = (
        plgpu.layout_cast(jnp.full((ROWS,), NOTHING_SEEN, jnp.float32), BY_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_ROW),
        _zeros(),
    )

    def visit(pair: Array, carry: tuple) -> tuple:
        cursor, softmax = carry
        softmax = attend(call, gmem, smem, part, segment, pair, cursor, Softmax(*softmax))
        return advance(call, gmem, part, cursor), tuple(softmax)

    cursor, softmax = lax.fori_loop(segment.begin_block, segment.end_block, visit, (cursor, softmax))
    _finish_row(call, gmem, smem, part, group, segment, Softmax(*softmax))
    return cursor


def _zeros() -> Float[Array, "64 256"]:
    return plgpu.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), plgpu.Layout.WGMMA)


def _lead(
    call: Call,
    gmem: Operands,
    smem: Shared,
    part: Part,
    segment: Segment,
    pair: Array,
    cursor: Cursor,
    softmax: Softmax,
) -> Softmax:
    """The first warpgroup's step: it multiplies its own block's weights, then those of the second block."""
    places = pages(call, gmem, cursor)  # read early: they are needed later
    scores = _scores(call, gmem, smem, segment, pair, LEADER)
    maximum = jnp.maximum(softmax.maximum, _row_max(call, scores))
    smem.row_max.at[LEADER][...] = maximum
    weights, own = _weights(call, smem, scores, maximum, LEADER)
    rescale = jnp.exp2(softmax.maximum - maximum)
    total = softmax.total * rescale + weights.sum(axis=1)
    _clear_unseen(smem, segment, pair, LEADER, LEADER)
    weighted = softmax.weighted * _by_row(rescale, softmax.weighted)
    weighted = _weigh(call, own, _latent(smem, pair, LEADER, LEADER), weighted)
    _load_own(call, gmem, smem, part, cursor, places, LEADER)

    plgpu.barrier_wait(smem.weighed.at[FOLLOWER])
    plgpu.barrier_wait(smem.crossed.at[FOLLOWER])
    final = _row_vector(smem.row_max.at[FOLLOWER])
    rescale = jnp.exp2(maximum - final)
    _clear_unseen(smem, segment, pair, FOLLOWER, LEADER)
    weighted = weighted * _by_row(rescale, weighted)
    shared = smem.rope.at[hidden_zero(pair) + FOLLOWER]
    weighted = _weigh(call, shared, _latent(smem, pair, FOLLOWER, LEADER), weighted)
    _load_crossed(call, gmem, smem, part, cursor, places, LEADER)
    return Softmax(final, total * rescale, weighted)


def _follow(
    call: Call,
    gmem: Operands,
    smem: Shared,
    part: Part,
    segment: Segment,
    pair: Array,
    cursor: Cursor,
    softmax: Softmax,
) -> Softmax:
    """The second warpgroup's step: it finds its own block's weights while it multiplies the first's."""
    places = pages(call, gmem, cursor)  # read early: they are needed later
    scores = _scores(call, gmem, smem, segment, pair, FOLLOWER)
    highest = _row_max(call, scores)
    plgpu.barrier_wait(smem.weighed.at[LEADER])
    plgpu.barrier_wait(smem.crossed.at[LEADER])
    before = _row_vector(smem.row_max.at[LEADER])
    maximum = jnp.maximum(before, highest)
    smem.row_max.at[FOLLOWER][...] = maximum
    _clear_unseen(smem, segment, pair, LEADER, FOLLOWER)

    def find_weights() -> tuple:
        weights, own = _weights(call, smem, scores, maximum, FOLLOWER)
        return softmax.total * jnp.exp2(softmax.maximum - maximum) + weights.sum(axis=1), own

    weighted = softmax.weighted * _by_row(jnp.exp2(softmax.maximum - before), softmax.weighted)
    shared = smem.rope.at[hidden_zero(pair) + LEADER]
    weighted, total, own = _weigh_and(call, shared, _latent(smem, pair, LEADER, FOLLOWER), weighted, find_weights)
    _load_crossed(call, gmem, smem, part, cursor, places, FOLLOWER)

    _clear_unseen(smem, segment, pair, FOLLOWER, FOLLOWER)
    weighted = weighted * _by_row(jnp.exp2(before - maximum), weighted)
    weighted = _weigh(call, own, _latent(smem, pair, FOLLOWER, FOLLOWER), weighted)
    _load_own(call, gmem, smem, part, cursor, places, FOLLOWER)
    return Softmax(maximum, total, weighted)


def _row_max(call: Call, scores: Float[Array, "64 64"]) -> Float[Array, "64"]:
    return scores.max(axis=1) * call.log2_scale


def _weights(call: Call, smem: Shared, scores: Array, maximum: Array, group: int) -> tuple[Array, Any]:
    """A block's weights, for the sum and as wgmma's operand. The other warpgroup gets them in shared memory."""
    weights = jnp.exp2(scores * call.log2_scale - _by_row(maximum, scores))
    rounded = own = weights.astype(jnp.bfloat16)
    smem.rope.at[group][...] = rounded
    if call.interpret is not None:  # its wgmma takes nothing from registers
        own = smem.staged.at[group]
        own[...] = rounded
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.weighed.at[group])
    return weights, own


def _scores(
    call: Call, gmem: Operands, smem: Shared, segment: Segment, pair: Array, group: int
) -> Float[Array, "64 64"]:
    """All rows against the warpgroup's block of the pair, unscaled."""
    place = hidden_zero(pair)

    def issue(accumulator: Any) -> None:
        for half in (LEADER, FOLLOWER):  # the leader is the first to load
            plgpu.barrier_wait((smem.own if half == group else smem.crossed).at[group])
            keys = _latent(smem, pair, group, half).transpose((1, 0))
            plgpu.wgmma(accumulator, smem.q_latent.at[place + half], keys)
        plgpu.wgmma(accumulator, smem.q_rope, smem.rope.at[place + group].transpose((1, 0)))

    scores = compat.product(issue, (ROWS, BLOCK))
    position = _position(pair, group)
    return lax.cond(
        is_masked(call, segment, position, BLOCK),
        lambda s: jnp.where(_seen(call, gmem, segment, position), s, -jnp.inf),
        lambda s: s,
        scores,
    )


def _latent(smem: Shared, pair: Array, block: int, half: int) -> Any:
    return smem.latent.at[hidden_zero(pair) + (2 * block + half)]


def _position(pair: Array, block: int) -> Array:
    return (2 * pair + block) * BLOCK


def _by_row(vector: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(vector, like.shape, [0])


def _weigh(call: Call, weights: Any, latent: Any, weighted: Float[Array, "64 256"]) -> Float[Array, "64 256"]:
    """weighted + weights @ latent, these weights in registers or shared memory."""
    interpreted = call.interpret is not None
    return compat.accumulate(weighted, lambda a: plgpu.wgmma(a, weights, latent), interpreted=interpreted)


def _weigh_and(call: Call, weights: Any, latent: Any, weighted: Array, find_weights: Callable[[], tuple]) -> tuple:
    """The same, and what `find_weights` finds while the tensor cores multiply."""
    if call.interpret is not None:
        return _weigh(call, weights, latent, weighted), *find_weights()

    def run(refs: tuple) -> None:
        accumulator, total, own = refs
        plgpu.wgmma(accumulator, weights, latent)
        total[...], own[...] = find_weights()

    total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_ROW)
    own = plgpu.layout_cast(jnp.zeros((ROWS, BLOCK), jnp.bfloat16), plgpu.Layout.WGMMA)
    return pl.run_state(run)((plgpu.ACC.init(weighted), total, own))


def _row_vector(ref: Any) -> Float[Array, "64"]:
    return plgpu.load(ref, layout=BY_ROW, optimized=False)


def _seen(call: Call, gmem: Operands, segment: Segment, position: Array) -> Array:
    """Which of the positions from `position` on each row of the tile sees, bool [64, 64]."""
    shape = (ROWS, BLOCK)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    position = position + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    tree = row_mask(call, gmem, segment.row, 0, ROWS, BY_ROW)
    if tree is not None:
        tree = tuple(_by_row(word, row) for word in tree)
    return seen(call, segment, row, position, tree)


def _clear_unseen(smem: Shared, segment: Segment, pair: Array, block: int, group: int) -> None:
    """Zeroes the warpgroup's half of a block where no query looks."""
    first = _position(pair, block)

    @pl.when((first < segment.low) | (first + BLOCK > segment.end))
    def _clear() -> None:
        clear_unseen(smem.latent.at[2 * block + group], segment, first)
        plgpu.commit_smem()


def _load_queries(call: Call, gmem: Operands, smem: Shared, part: Part, cursor: Cursor) -> None:
    """Starts the load of the queries of the cursor's row, if this part works on it."""

    @pl.when(is_wanted(part, cursor))
    def _load() -> None:
        rows = tile_rows(call)
        for half in range(2):
            columns = pl.ds(half * HALF, HALF)
            plgpu.copy_gmem_to_smem(
                gmem.q_latent.at[cursor.row, rows, columns], smem.q_latent.at[half], smem.q_loaded
            )
        plgpu.copy_gmem_to_smem(gmem.q_rope.at[cursor.row, rows], smem.q_rope, smem.q_loaded)


def _load_own(
    call: Call, gmem: Operands, smem: Shared, part: Part, cursor: Cursor, places: tuple, group: int
) -> None:
    """Starts the load of the warpgroup's half of the block of the cursor's pair that it scores."""

    @pl.when(is_wanted(part, cursor))
    def _load() -> None:
        _load_half(call, gmem, smem, places, group, group, smem.own.at[group])


def _load_crossed(
    call: Call, gmem: Operands, smem: Shared, part: Part, cursor: Cursor, places: tuple, group: int
) -> None:
    """Starts the load of the warpgroup's half of the other block, and of that block's rotary keys."""
    block = 1 - group
    loaded = smem.crossed.at[block]

    @pl.when(is_wanted(part, cursor))
    def _load() -> None:
        _load_half(call, gmem, smem, places, block, group, loaded)
        for page, rows in _pieces(call, places, block):
            plgpu.copy_gmem_to_smem(gmem.rope_pool.at[page], smem.rope.at[block, rows], loaded)


def _load_half(call: Call, gmem: Operands, smem: Shared, places: tuple, block: int, half: int, loaded: Any) -> None:
    columns = pl.ds(half * HALF, HALF)
    for page, rows in _pieces(call, places, block):
        plgpu.copy_gmem_to_smem(gmem.latent_pool.at[page, :, columns], smem.latent.at[2 * block + half, rows], loaded)


def _pieces(call: Call, places: tuple, block: int) -> list[tuple]:
    """Of one block, where its pieces are in the pools and which rows they become."""
    loads = BLOCK // call.load_rows
    places = places[block * loads : (block + 1) * loads]
    return [(place, pl.ds(load * call.load_rows, call.load_rows)) for load, place in enumerate(places)]


def _finish_row(
    call: Call, gmem: Operands, smem: Shared, part: Part, group: int, segment: Segment, softmax: Softmax
) -> None:
    """Normalises and writes a row: to the output when nobody else has a share of it, else to this part's slot."""
    if group == LEADER and not call.whole:  # the last weights came, so both have scored: the queries are used up
        _load_queries(call, gmem, smem, part, cursor_at(call, gmem, part, gmem.rows[segment.row, 2]))
    smem.row_sum.at[group][...] = softmax.total
    compat.synchronise(smem.finished)
    sums = (_row_vector(smem.row_sum.at[g]) for g in (LEADER, FOLLOWER))
    total = next(sums) + next(sums)
    divisor = jnp.where(total > 0, total, 1.0)
    result = softmax.weighted * _by_row(1.0 / divisor, softmax.weighted)
    if call.whole:
        _store(call, gmem.out.at[segment.row], group, result)
        return
    pl.when(segment.whole)(lambda: _store(call, gmem.out.at[segment.row], group, result))

    @pl.when(jnp.logical_not(segment.whole))
    def _store_partial() -> None:
        slot = 2 * lax.axis_index("part") + segment.starts_row.astype(jnp.int32)
        _store(call, gmem.partial.at[slot], group, result)
        if group == LEADER:
            log_sum = jnp.where(total > 0, softmax.maximum + jnp.log2(divisor), -jnp.inf)
            compat.store_global(gmem.log_sum.at[slot, tile_rows(call)], log_sum)


def _store(call: Call, ref: Any, group: int, result: Float[Array, "64 256"]) -> None:
    """Writes this warpgroup's columns of the tile's rows."""
    place = ref.at[tile_rows(call), pl.ds(group * HALF, HALF)]
    compat.store_global(place, result.astype(ref.dtype))
