"""The ledger: how many positions each row may write, and what it must give back.

At rest a row's capacity is its `kv_len`. A round of K drafts is granted `1 + 2K` more: the verification writes
`1 + K` positions and the drafter writes up to K - 1 beyond the last accepted one. Settling returns the K
positions of slack and those of rejected drafts, so that the net growth is `1 + accepted` whatever K was: slack
that is granted every round but never returned outgrows the table, and room for `1 + K` alone lets the device
write past its last page. Rules and vectors follow TensorRT-LLM's pull request 16280.

Every transition moves pages at the same time: a row always holds exactly the pages of its capacity.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from jaxspec.cache.page_table import PageTable, drop, grow, shrink, table_faults

NO_GRANT = -1


@struct.dataclass
class Capacity:
    """Positions in tokens, per row.

    Attributes:
        capacity: positions the row may write.
        granted_drafts: K of the outstanding grant, NO_GRANT when there is none.
        slack: positions of that grant that no accepted token will ever need.
    """

    capacity: Int[Array, "b"]
    granted_drafts: Int[Array, "b"]
    slack: Int[Array, "b"]

    @classmethod
    def create(cls, num_rows: int) -> Capacity:
        """Rows that hold nothing."""
        capacity, slack = (jnp.zeros(num_rows, jnp.int32) for _ in range(2))
        return cls(capacity=capacity, granted_drafts=jnp.full(num_rows, NO_GRANT, jnp.int32), slack=slack)


Ledger = tuple[Capacity, PageTable]


def growth(num_drafts: int) -> int:
    """Positions a round of so many drafts is granted."""
    return 1 + 2 * num_drafts


def reserve(ledger: Ledger, num_tokens: Int[Array, "b"], max_tokens: int) -> tuple[Ledger, Bool[Array, "b"]]:
    """Room for prompts: capacity becomes `num_tokens` where that is more.

    Args:
        ledger: capacities and table.
        num_tokens: tokens per row; 0 leaves a row alone.
        max_tokens: static bound on `num_tokens`.

    Returns:
        The ledger, and which rows have the room; the others are unchanged.
    """
    return _raise_to(ledger, jnp.maximum(ledger[0].capacity, num_tokens), max_tokens)


def grant(ledger: Ledger, rows: Bool[Array, "b"], num_drafts: int) -> tuple[Ledger, Bool[Array, "b"]]:
    """Capacity += 1 + 2K for `rows`. A row without enough pages gets and records nothing: it stalls."""
    capacity, _ = ledger
    (capacity, table), ok = _raise_to(
        ledger, capacity.capacity + jnp.where(rows, growth(num_drafts), 0), growth(num_drafts)
    )
    return (_record(capacity, rows & ok, num_drafts), table), rows & ok


def top_up(
    ledger: Ledger, rows: Bool[Array, "b"], num_drafts: int, more_drafts: int
) -> tuple[Ledger, Bool[Array, "b"]]:
    """Capacity += 2 (K1 - K0), for a batch padded from K0 to a compiled K1 after its grant."""
    capacity, _ = ledger
    rows = rows & (capacity.granted_drafts == num_drafts)
    extra = growth(more_drafts) - growth(num_drafts)
    (capacity, table), ok = _raise_to(ledger, capacity.capacity + jnp.where(rows, extra, 0), extra)
    return (_record(capacity, rows & ok, more_drafts), table), rows & ok


def revert(ledger: Ledger, rows: Bool[Array, "b"], num_drafts: int) -> Ledger:
    """The granted round did not run: the whole grant goes back. Without a grant nothing happens.

    `num_drafts` is a static bound on the K granted.
    """
    capacity, _ = ledger
    rows = rows & (capacity.granted_drafts != NO_GRANT)
    back = 1 + capacity.granted_drafts + capacity.slack
    return _lower_to(ledger, rows, capacity.capacity - back, growth(num_drafts))


def settle(
    ledger: Ledger, rows: Bool[Array, "b"], num_accepted: Int[Array, "b"], committed: Int[Array, "b"], num_drafts: int
) -> Ledger:
    """The round ran: rejected drafts and slack go back, by the K *recorded* with the grant.

    Args:
        ledger: capacities and table.
        rows: rows that ran; those without a grant are left alone.
        num_accepted: accepted drafts per row.
        committed: tokens the row has now (prompt and output); capacity never falls below committed - 1.
        num_drafts: static bound on the K granted.
    """
    capacity, _ = ledger
    rows = rows & (capacity.granted_drafts != NO_GRANT)
    back = jnp.maximum(capacity.granted_drafts - num_accepted, 0) + capacity.slack
    lowered = jnp.maximum(capacity.capacity - back, committed - 1)
    return _lower_to(ledger, rows, lowered, growth(num_drafts))


def release(ledger: Ledger, rows: Bool[Array, "b"]) -> Ledger:
    """`rows` hold no page any more; those that nobody else holds are free. A second release finds nothing to give."""
    capacity, table = ledger
    mine = rows[:, None]
    table = drop(table, table.references(jnp.where(mine, table.page_ids, 0)))
    table = table.replace(page_ids=jnp.where(mine, 0, table.page_ids), num_pages=jnp.where(rows, 0, table.num_pages))
    return _lower(capacity, rows, jnp.zeros_like(capacity.capacity)), table


def ledger_faults(
    ledger: Ledger, kv_len: Int[Array, "b"], held: Int[Array, "p"] | None = None
) -> dict[str, Bool[Array, ""]]:
    """Broken laws of table and capacities, each True where it is broken; for debug mode and tests.

    Args:
        ledger: capacities and table, of all rows.
        kv_len: tokens cached in each row.
        held: how many handles of the prefix cache hold each page; none where not given.
    """
    capacity, table = ledger
    granted = capacity.granted_drafts != NO_GRANT
    outstanding = jnp.where(granted, 1 + capacity.granted_drafts + capacity.slack, 0)
    pages = table.pages_for(capacity.capacity)
    writable = jnp.arange(table.page_ids.shape[1])[None] >= (kv_len // table.page_size)[:, None]
    shared = table.num_refs[table.page_ids] > 1
    return table_faults(table, held) | {
        "pages held differ from those of the capacity": jnp.any(table.num_pages != pages),
        "slack without a grant, or not K": jnp.any(capacity.slack != jnp.where(granted, capacity.granted_drafts, 0)),
        "capacity is not kv_len and the outstanding grant": jnp.any(capacity.capacity != kv_len + outstanding),
        "a row may write to a page that others hold": jnp.any(writable & shared),
    }


def _raise_to(ledger: Ledger, target: Int[Array, "b"], max_growth: int) -> tuple[Ledger, Bool[Array, "b"]]:
    capacity, table = ledger
    table, ok = grow(table, table.pages_for(target), -(-max_growth // table.page_size) + 1)
    return (capacity.replace(capacity=jnp.where(ok, target, capacity.capacity)), table), ok


def _record(capacity: Capacity, rows: Bool[Array, "b"], num_drafts: int) -> Capacity:
    return capacity.replace(
        granted_drafts=jnp.where(rows, num_drafts, capacity.granted_drafts),
        slack=jnp.where(rows, num_drafts, capacity.slack),
    )


def _lower(capacity: Capacity, rows: Bool[Array, "b"], target: Int[Array, "b"]) -> Capacity:
    return Capacity(
        capacity=jnp.where(rows, target, capacity.capacity),
        granted_drafts=jnp.where(rows, NO_GRANT, capacity.granted_drafts),
        slack=jnp.where(rows, 0, capacity.slack),
    )


def _lower_to(ledger: Ledger, rows: Bool[Array, "b"], target: Int[Array, "b"], max_loss: int) -> Ledger:
    """Capacity becomes `target` in `rows`, whose grant is cleared."""
    capacity, table = ledger
    lowered = _lower(capacity, rows, target)
    width = -(-max_loss // table.page_size) + 1
    return lowered, shrink(table, table.pages_for(lowered.capacity), width)
