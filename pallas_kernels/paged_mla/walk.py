"""What both Mosaic kernels share: a call's constants and arrays, and the walk over rows, blocks and pages.

A kernel runs once for each part of the GPU and each row tile: it visits the rows of its part (`splits.py`), and of
each row the blocks of `block_tokens` positions that are its share, while a cursor runs ahead and starts their loads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool

from pallas_kernels.paged_mla.splits import first_seen

LATENT, ROPE = 512, 64
HALF = LATENT // 2  # latent columns of a warpgroup
PIECE = 64  # slots of a TMA load, at most


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call. `scale` multiplies the scores; `whole`: each row is a part of its own."""

    batch: int
    num_queries: int
    heads: int
    num_pages: int
    page_size: int
    columns: int
    num_parts: int
    scale: float
    first: int
    sliding_window: int | None
    tree: bool
    quantised: bool
    whole: bool
    row_tile: int
    block_tokens: int
    stages: int
    interpret: Any = None

    @property
    def tiles(self) -> int:
        """Row tiles of a batch row."""
        return -(-self.num_queries * self.heads // self.row_tile)

    @property
    def log2_scale(self) -> float:
        """Of scores in log2 units."""
        return self.scale * np.log2(np.e)

    @property
    def load_rows(self) -> int:
        """Slots of one TMA load: a page, or a piece of it."""
        return min(self.page_size, PIECE)

    @property
    def pieces(self) -> int:
        """Pieces of a page; 1 up to pages of 64."""
        return self.page_size // self.load_rows

    def tile(self) -> Array:
        """This run's row tile. With whole rows, those with the longest context come first: the last ones fill up."""
        tile = lax.axis_index("tile")
        return self.tiles - 1 - tile if self.whole else tile


class Operands(NamedTuple):
    """Refs in GMEM, in the order the kernel gets them. Pools are cut into pieces of `load_rows` slots."""

    q_latent: Any  # [b, tiles * row_tile, 512]
    q_rope: Any  # [b, tiles * row_tile, 64]
    latent_pool: Any  # [n * p * pieces, load_rows, 512]
    rope_pool: Any  # [n * p * pieces, load_rows, 64]
    layer: Any  # [1]
    page_ids: Any  # [b, m]
    start: Any  # [b]
    length: Any  # [b]
    parts: Any  # [parts, 4]
    rows: Any  # [b, 3]
    tree: Any  # [2, b, tiles * row_tile] i32, low words and high words; None without a tree
    scale_pool: Any  # [n * p, 4, pieces, load_rows] f32; None unless quantised
    q_scale: Any  # [b, tiles * row_tile] f32, likewise
    out: Any  # [b, tiles * row_tile, 512]: rows that one part did alone
    partial: Any  # [2 * parts, tiles * row_tile, 512] f32: the others, normalised by their own sum; None if whole
    log_sum: Any  # [2 * parts, tiles * row_tile] f32: log2 of that sum; likewise


def operands(call: Call, refs: tuple) -> Operands:
    """The refs by name; those that this call has not are None."""
    absent = {"tree": not call.tree, "scale_pool": not call.quantised, "q_scale": not call.quantised}
    absent |= {"partial": call.whole, "log_sum": call.whole}
    given = iter(refs)
    return Operands(*(None if absent.get(name) else next(given) for name in Operands._fields))


class Part(NamedTuple):
    """This part's line of `Splits.parts`."""

    first_row: Array
    from_block: Array
    last_row: Array
    to_block: Array


def this_part(gmem: Operands) -> Part:
    """The part that this run of the kernel does."""
    return Part(*(gmem.parts[lax.axis_index("part"), i] for i in range(4)))


def visit_rows(
    call: Call,
    gmem: Operands,
    part: Part,
    run: Callable[[Segment, Any], Any],
    store_zeros: Callable[[Array], None],
    carry: Any,
) -> None:
    """Runs the part's rows, one after the other; `store_zeros` writes those that nobody works on."""

    def visit(row: Array, carry: Any) -> Any:
        here = segment(call, gmem, part, row)
        some = here.begin_block < here.end_block
        if call.whole:  # the tile may be idle where its row is not
            pl.when(jnp.logical_not(some))(lambda: store_zeros(row))
        return lax.cond(some, lambda c: run(here, c), lambda c: c, carry)

    lax.fori_loop(part.first_row, part.last_row + 1, visit, carry)
    if not call.whole:
        _zero_idle_rows(call, gmem, store_zeros)


def _zero_idle_rows(call: Call, gmem: Operands, store: Callable[[Array], None]) -> None:
    """Has `store` write zeros to the rows that no part works on. Each part sees to a share of them."""
    index = lax.axis_index("part")

    def visit(turn: Array, carry: None) -> None:
        row = turn * call.num_parts + index
        pl.when(gmem.rows[row, 1] < gmem.rows[row, 0])(lambda: store(row))
        return carry

    lax.fori_loop(0, lax.div(call.batch - index + (call.num_parts - 1), jnp.int32(call.num_parts)), visit, None)


class Segment(NamedTuple):
    """One row's work in a part, for one row tile."""

    row: Array
    start: Array  # position of the row's first query
    low: Array  # the positions that any query of the tile sees: from `low` up to `end`
    end: Array
    clear_low: Array  # and those that all of them see
    clear_end: Array
    begin_block: Array  # the part's share, in blocks from position 0
    end_block: Array
    whole: Array  # no other part has a share of the row
    starts_row: Array  # it begins with the row's first block


def segment(call: Call, gmem: Operands, part: Part, row: Array) -> Segment:
    """The part's work in `row`, one of its rows."""
    start, length = gmem.start[row], gmem.length[row]
    first_query, last_query = jnp.int32(0), length - 1
    if call.whole:  # only here may a tile end before the row does: all tiles share the parts' bounds
        rows = call.tile() * call.row_tile
        first_query = lax.div(rows, jnp.int32(call.heads))
        last_query = jnp.minimum(lax.div(rows + (call.row_tile - 1), jnp.int32(call.heads)), last_query)
    low = first_seen(start + first_query, call.first, call.sliding_window)
    end = start + length if call.tree else start + last_query + 1
    low_block = lax.div(low, jnp.int32(call.block_tokens))
    high_block = lax.div(end + (call.block_tokens - 1), jnp.int32(call.block_tokens))
    high_block = jnp.where((first_query < length) & (low < end), high_block, low_block)
    begin = low_block + jnp.where(row == part.first_row, part.from_block, 0)
    stop = jnp.where(row == part.last_row, jnp.minimum(low_block + part.to_block, high_block), high_block)
    return Segment(
        row,
        start,
        low,
        end,
        first_seen(start + last_query, call.first, call.sliding_window),
        start if call.tree else start + first_query + 1,
        begin,
        stop,
        (begin == low_block) & (stop == high_block),
        begin == low_block,
    )


def is_masked(call: Call, segment: Segment, position: Array, size: int) -> Array:
    """Whether some query of the tile does not see some of the `size` positions from `position` on."""
    return (position < segment.clear_low) | (position + size > segment.clear_end)


def seen(
    call: Call, segment: Segment, row: Array, position: Array, tree: tuple[Array, Array] | None
) -> Bool[Array, "..."]:
    """Which rows of the tile see which positions. `tree`: the low and high words of each row's mask."""
    if tree is None:
        query = segment.start + lax.div(call.tile() * call.row_tile + row, jnp.int32(call.heads))
        at_most = jnp.minimum(query, segment.end - 1)
        return (position <= at_most) & (position >= first_seen(query, call.first, call.sliding_window))
    node = position - segment.start
    word = jnp.where(node < 32, *tree)
    bit = lax.shift_right_logical(word, node & 31) & 1
    return (position < segment.end) & (position >= call.first) & ((node < 0) | ((node < 64) & (bit != 0)))


def hidden_zero(block: Array) -> Array:
    """Zero, but no compiler can tell: it would compute all of wgmma's descriptors before the loop, and spill them."""
    return jnp.minimum(block, 0)


class Cursor(NamedTuple):
    """The next block to load: ahead of the one in use by the ring's size, also into the next row."""

    row: Array  # `call.batch`: there is none
    block: Array
    end_block: Array
    first_column: Array  # of the row in the page table
    last_column: Array


def cursor_at(call: Call, gmem: Operands, part: Part, row: Array) -> Cursor:
    """At the row's first block in this part."""
    here = segment(call, gmem, part, jnp.minimum(row, call.batch - 1))
    first_column, last_column = (lax.div(at, jnp.int32(call.page_size)) for at in (here.low, here.end - 1))
    return Cursor(row, here.begin_block, here.end_block, first_column, last_column)


def advance(call: Call, gmem: Operands, part: Part, cursor: Cursor) -> Cursor:
    """The block after, in this row or the next one with work."""

    def next_row(cursor: Cursor) -> Cursor:
        return cursor_at(call, gmem, part, gmem.rows[jnp.minimum(cursor.row, call.batch - 1), 2])

    cursor = cursor._replace(block=cursor.block + 1)
    if call.whole:  # a part has one row: past its end there is nothing to load
        return cursor
    return lax.cond(cursor.block < cursor.end_block, lambda c: c, next_row, cursor)


def is_wanted(part: Part, cursor: Cursor) -> Array:
    """Whether the part has the cursor's block."""
    return (cursor.row <= part.last_row) & (cursor.block < cursor.end_block)


def pages(call: Call, gmem: Operands, cursor: Cursor) -> tuple[Array, ...]:
    """Where the pieces of a block lie in the pools.

    Pieces outside the row's pages repeat one inside, since the table's other entries may be anything.
    """
    row = jnp.minimum(cursor.row, call.batch - 1)
    found = []
    for load in range(call.block_tokens // call.load_rows):
        position = cursor.block * call.block_tokens + load * call.load_rows
        column = lax.div(position, jnp.int32(call.page_size))
        column = jnp.maximum(jnp.minimum(column, cursor.last_column), cursor.first_column)
        piece = lax.rem(lax.div(position, jnp.int32(call.load_rows)), jnp.int32(call.pieces))
        page = gmem.page_ids[row, jnp.minimum(column, call.columns - 1)]
        found.append((gmem.layer[0] * call.num_pages + page) * call.pieces + piece)
    return tuple(found)


def clear_unseen(latent: Any, segment: Segment, position: Array) -> None:
    """Zeroes latents in shared memory, from `position` on, where no query looks: 0 * NaN would still be NaN."""
    shape = (latent.shape[0], 64)  # 64 columns at a time: few registers
    position = position + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    keep = (position < segment.end) & (position >= segment.low)
    for column in range(0, latent.shape[1], shape[1]):
        part = latent.at[:, pl.ds(column, shape[1])]
        values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where(keep, values, jnp.zeros((), values.dtype))


def tile_rows(call: Call) -> Any:
    """The tile's slice of a batch row's rows."""
    return pl.ds(call.tile() * call.row_tile, call.row_tile)


def row_mask(
    call: Call, gmem: Operands, row: Array, first: int, size: int, layout: Any
) -> tuple[Array, Array] | None:
    """The tree mask's words of `size` of the tile's rows from `first` on, in registers; None without a tree."""
    if gmem.tree is None:
        return None
    rows = pl.ds(call.tile() * call.row_tile + first, size)
    return tuple(plgpu.load(gmem.tree.at[i, row, rows], layout=layout, optimized=False) for i in range(2))
