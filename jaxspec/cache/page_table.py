"""Which pages of the pool each row holds. Page 0 is scratch: writes that must not land anywhere land there.

Invariant: a page of 1..P-1 is on the free list, exactly once, if and only if nobody holds it. Several rows may hold a
page, each in one column, and so may handles of the prefix cache; `num_refs` is how many they are.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int


@struct.dataclass
class PageTable:
    """Pages by row, and a stack of free pages.

    Attributes:
        page_ids: page of each column, 0 where none is allocated.
        num_pages: columns allocated in each row.
        free_ids: the free pages, in the first `num_free` places.
        num_free: how many are free.
        num_refs: how many rows and handles hold each page.
        page_size: tokens a page holds.
    """

    page_ids: Int[Array, "b m"]
    num_pages: Int[Array, "b"]
    free_ids: Int[Array, "p"]
    num_free: Int[Array, ""]
    num_refs: Int[Array, "p"]
    page_size: int = struct.field(pytree_node=False)

    @classmethod
    def create(cls, num_rows: int, pages_per_row: int, num_pages: int, page_size: int) -> PageTable:
        """An empty table over a pool of `num_pages` pages, the scratch page included."""
        if num_pages < 2:
            raise ValueError(f"a pool needs the scratch page and one more: got {num_pages} pages")
        return cls(
            page_ids=jnp.zeros((num_rows, pages_per_row), jnp.int32),
            num_pages=jnp.zeros(num_rows, jnp.int32),
            free_ids=jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32),
            num_free=jnp.int32(num_pages - 1),
            num_refs=jnp.zeros(num_pages, jnp.int32),
            page_size=page_size,
        )

    def pages_for(self, num_tokens: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """Pages that hold so many tokens."""
        return (num_tokens + self.page_size - 1) // self.page_size

    def references(self, page_ids: Int[Array, "*n"]) -> Int[Array, "p"]:
        """How often each page is named; scratch counts for nothing."""
        return jnp.zeros_like(self.num_refs).at[page_ids].add(1).at[0].set(0)


def grow(table: PageTable, target: Int[Array, "b"], width: int) -> tuple[PageTable, Bool[Array, "b"]]:
    """Brings every row to `target` pages if it holds fewer, in row order, all or nothing for each row.

    A row that wants more than is left gets nothing, and those after it that want less go on: were they to wait for
    it, it might wait for them.

    Args:
        table: the table.
        target: pages wanted by each row.
        width: static bound on the pages one row may gain; a row that wants more gets none.

    Returns:
        The table, and which rows have at least `target` pages now.
    """
    need = jnp.maximum(target - table.num_pages, 0)
    possible = (need <= width) & (target <= table.page_ids.shape[1])
    granted = possible & _fits(jnp.where(possible, need, 0), table.num_free)
    taken = jnp.where(granted, need, 0)
    first = jnp.cumsum(taken) - taken
    step = jnp.arange(width)[None]
    new = step < taken[:, None]
    source = table.num_free - 1 - (first[:, None] + step)
    pages = table.free_ids[jnp.where(new, source, 0)]
    column = jnp.where(new, table.num_pages[:, None] + step, table.page_ids.shape[1])
    rows = jnp.arange(need.shape[0])[:, None]
    grown = table.replace(
        page_ids=table.page_ids.at[rows, column].set(pages, mode="drop"),
        num_pages=table.num_pages + taken,
        num_free=table.num_free - jnp.sum(taken),
        num_refs=table.num_refs.at[jnp.where(new, pages, table.num_refs.shape[0])].set(1, mode="drop"),
    )
    return grown, granted


def _fits(need: Int[Array, "b"], num_free: Int[Array, ""]) -> Bool[Array, "b"]:
    """Rows that find their pages when they are served in order."""

    def serve(left: Array, wanted: Array) -> tuple[Array, Array]:
        fits = wanted <= left
        return left - jnp.where(fits, wanted, 0), fits

    # One by one only when the pool runs dry.
    return lax.cond(
        jnp.sum(need) <= num_free,
        lambda: jnp.ones(need.shape, bool),
        lambda: lax.scan(serve, num_free, need)[1],
    )


def shrink(table: PageTable, target: Int[Array, "b"], width: int) -> PageTable:
    """Returns the pages each row holds beyond `target` to the free list.

    The row alone must hold them: only whole pages below kv_len are shared, and no row that goes on falls below that.
    `drop` is for pages that others may hold.

    Args:
        table: the table.
        target: pages each row keeps at most.
        width: static bound on the pages one row may lose; a row keeps what is beyond it.
    """
    given = jnp.clip(table.num_pages - target, 0, width)
    first = jnp.cumsum(given) - given
    step = jnp.arange(width)[None]
    old = step < given[:, None]
    column = jnp.where(old, table.num_pages[:, None] - 1 - step, table.page_ids.shape[1])
    rows = jnp.arange(given.shape[0])[:, None]
    pages = table.page_ids.at[rows, column].get(mode="fill", fill_value=0)
    place = jnp.where(old, table.num_free + first[:, None] + step, table.free_ids.shape[0])
    return table.replace(
        page_ids=table.page_ids.at[rows, column].set(0, mode="drop"),
        num_pages=table.num_pages - given,
        free_ids=table.free_ids.at[place].set(pages, mode="drop"),
        num_free=table.num_free + jnp.sum(given),
        num_refs=table.num_refs.at[jnp.where(old, pages, table.num_refs.shape[0])].set(0, mode="drop"),
    )


def drop(table: PageTable, lost: Int[Array, "p"]) -> PageTable:
    """Takes `lost` references from each page; those that nobody holds any more are free, each once."""
    left = table.num_refs - lost
    freed = (lost > 0) & (left == 0)
    pool = jnp.arange(left.shape[0])
    place = jnp.where(freed, table.num_free + jnp.cumsum(freed) - 1, left.shape[0])
    return table.replace(
        free_ids=table.free_ids.at[place].set(pool, mode="drop"),
        num_free=table.num_free + jnp.sum(freed),
        num_refs=left,
    )


def slots_of(table: PageTable, positions: Int[Array, "b w"], valid: Bool[Array, "b w"]) -> Int[Array, "b w"]:
    """Slot (page * page_size + offset) of each position; on the scratch page where not `valid` or not allocated."""
    column = positions // table.page_size
    held = valid & (positions >= 0) & (column < table.num_pages[:, None])
    rows = jnp.arange(positions.shape[0])[:, None]
    page = jnp.where(held, table.page_ids[rows, jnp.where(held, column, 0)], 0)
    return page * table.page_size + jnp.where(held, positions % table.page_size, 0)


def table_faults(table: PageTable, held: Int[Array, "p"] | None = None) -> dict[str, Bool[Array, ""]]:
    """What is wrong with the table: each entry is True where a law is broken.

    Args:
        table: the table of all rows.
        held: how many handles of the prefix cache hold each page; none where not given.
    """
    num_columns = table.page_ids.shape[1]
    owned = jnp.arange(num_columns)[None] < table.num_pages[:, None]
    is_free = jnp.arange(table.free_ids.shape[0]) < table.num_free
    holders = table.references(jnp.where(owned, table.page_ids, 0)) + (0 if held is None else held)
    free = table.references(jnp.where(is_free, table.free_ids, 0))
    in_order = jnp.sort(table.page_ids, axis=1)
    return {
        "a page is lost or its references are miscounted": jnp.any(holders != table.num_refs)
        | jnp.any((holders + free)[1:] == 0),
        "a page is free twice, or free and held": jnp.any((free > 1) | ((free > 0) & (holders > 0))),
        "a row names a page twice": jnp.any((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != 0)),
        "the scratch page is owned or free": jnp.any(owned & (table.page_ids == 0))
        | jnp.any(is_free & (table.free_ids == 0)),
        "an unallocated column names a page": jnp.any(~owned & (table.page_ids != 0)),
        "a count is out of range": (table.num_free < 0)
        | (table.num_free >= table.free_ids.shape[0])
        | jnp.any((table.num_pages < 0) | (table.num_pages > num_columns)),
    }
