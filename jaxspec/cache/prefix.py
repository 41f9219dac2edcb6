"""Pages that outlive their rows, so that prompts which begin alike share them.

The host knows which tokens a page holds, but never its id: it names pages by handles, numbers of its own choice, and
the device keeps the page under each. A handle holds its page like a row does. What others may hold is never written
to: only whole pages below kv_len are published, and a row that goes on within a page gets a copy of it.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from jaxspec.cache.capacity import Ledger
from jaxspec.cache.page_table import PageTable, drop


@struct.dataclass
class PublishedPages:
    """Pages by handle.

    Attributes:
        page_ids: the page under each handle, 0 for none.
    """

    page_ids: Int[Array, "h"]

    @classmethod
    def create(cls, num_handles: int) -> PublishedPages:
        """No page under any handle."""
        if num_handles < 1:
            raise ValueError(f"num_handles: got {num_handles}, expected at least 1")
        return cls(jnp.zeros(num_handles, jnp.int32))


def publish(
    table: PageTable, published: PublishedPages, row: Int[Array, ""], handles: Int[Array, "m"]
) -> tuple[PageTable, PublishedPages]:
    """Puts pages of a row under handles, which hold them from then on.

    Args:
        table: the table.
        published: the pages under handles.
        row: whose pages.
        handles: for each column a handle that names no page yet, or h and beyond for none. A column that is not
            allocated is left out.

    Raises:
        ValueError: at trace time, when the handles are not one for each column.
    """
    _check_width(table, handles)
    pages = jnp.where(handles < published.page_ids.shape[0], table.page_ids[row], 0)
    named = jnp.where(pages != 0, handles, published.page_ids.shape[0])
    return (
        table.replace(num_refs=table.num_refs + table.references(pages)),
        published.replace(page_ids=published.page_ids.at[named].set(pages, mode="drop")),
    )


def withdraw(
    table: PageTable, published: PublishedPages, which: Bool[Array, "h"]
) -> tuple[PageTable, PublishedPages]:
    """Forgets what is under the handles `which`; pages that nobody else holds are free."""
    lost = table.references(jnp.where(which, published.page_ids, 0))
    return drop(table, lost), published.replace(page_ids=jnp.where(which, 0, published.page_ids))


def adopt(
    ledger: Ledger,
    published: PublishedPages,
    row: Int[Array, ""],
    handles: Int[Array, "m"],
    num_tokens: Int[Array, ""],
) -> tuple[Ledger, Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """Gives an empty row the published pages of its first tokens.

    A row that is to go on within the last page would write to it, and gets a free page instead, to hold a copy.

    Args:
        ledger: capacities and table.
        published: the pages under handles.
        row: a row without pages.
        handles: of the pages, in order; what is beyond `num_tokens` is not looked at.
        num_tokens: how many tokens the row takes over.

    Returns:
        The ledger; the tokens taken over, which are the row's capacity now; and the page to copy, and the one to copy
        it to, both 0 for none. A handle without a page ends the prefix before it, as does a copy without a free page.

    Raises:
        ValueError: at trace time, when the handles are not one for each column.
    """
    capacity, table = ledger
    _check_width(table, handles)
    page_size, column = table.page_size, jnp.arange(handles.shape[0])
    pages = published.page_ids.at[handles].get(mode="fill", fill_value=0)
    num_tokens = jnp.minimum(num_tokens, jnp.sum(jnp.cumprod(pages != 0)) * page_size)
    num_shared = num_tokens // page_size
    copies = (num_tokens % page_size != 0) & (table.num_free > 0)
    num_tokens = jnp.where(copies, num_tokens, num_shared * page_size)
    # Without a copy the column may be beyond the last; what is read there is not used.
    source = jnp.where(copies, pages[jnp.minimum(num_shared, column.shape[0] - 1)], 0)
    target = jnp.where(copies, table.free_ids[jnp.maximum(table.num_free - 1, 0)], 0)
    pages = jnp.where(column < num_shared, pages, jnp.where(column == num_shared, target, 0))
    table = table.replace(
        page_ids=table.page_ids.at[row].set(pages),
        num_pages=table.num_pages.at[row].set(num_shared + copies),
        num_free=table.num_free - copies,
        num_refs=table.num_refs + table.references(pages),
    )
    return (capacity.replace(capacity=capacity.capacity.at[row].set(num_tokens)), table), num_tokens, source, target


def held_pages(table: PageTable, published: PublishedPages) -> Int[Array, "p"]:
    """How many handles hold each page of the table's pool."""
    return table.references(published.page_ids)


def _check_width(table: PageTable, handles: Int[Array, "m"]) -> None:
    if handles.shape[0] != table.page_ids.shape[1]:
        raise ValueError(
            f"handles: got {handles.shape[0]}, expected {table.page_ids.shape[1]}, one for each column of the table"
        )
