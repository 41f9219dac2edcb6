"""Cuts a batch's cache into runs of work of about equal length, one per part of the GPU.

After the tile scheduler of FlashMLA (csrc/smxx/get_mla_metadata.cu), in closed form: no walk over the rows. Rows lie
on a line one after the other, each with a fixed overhead before its blocks, and the line is cut evenly. A row's
overhead counts where the row starts; FlashMLA charges it again to every part that goes on with the row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

ROW_OVERHEAD = 320  # what starting a row costs, in positions (FlashMLA's value; not measured here)
EVERY_BLOCK = 2**30


class Splits(NamedTuple):
    """Who attends to what; made once per round, shared by all layers. Blocks count from the first one a row sees."""

    parts: Int[Array, "p 4"]  # first row, its first block, last row, the block it ends before
    rows: Int[Array, "b 3"]  # of each row: first part, last part (below the first: no work), the next row with work


def first_seen(start: Array, first: int, sliding_window: int | None) -> Array:
    """The first position that a query at `start` sees."""
    return jnp.maximum(first, start - ((sliding_window or 2**30) - 1))


def row_blocks(
    start: Int[Array, "*b"], length: Int[Array, "*b"], block: int, first: int, sliding_window: int | None
) -> Int[Array, "*b"]:
    """How many blocks of `block` positions a row's queries see; 0 without queries."""
    low, end = first_seen(start, first, sliding_window), start + length
    return jnp.where((length > 0) & (low < end), (end + block - 1) // block - low // block, 0)


def make_splits(
    start: Int[Array, "b"],
    length: Int[Array, "b"],
    num_parts: int | None,
    block: int,
    first: int = 0,
    sliding_window: int | None = None,
) -> Splits:
    """The split table of a batch.

    Args:
        start: position of each row's first query.
        length: queries of each row.
        num_parts: parts to fill, the streaming multiprocessors divided by the row tiles; None: a part for each row.
        block: positions that the kernel attends to at a time.
        first: positions below it are seen by no query.
        sliding_window: how many positions a query sees at most, its own included; None: all.
    """
    batch = start.shape[0]
    if num_parts is None:
        row, zero = jnp.arange(batch), jnp.zeros(batch, jnp.int32)
        parts = jnp.stack([row, zero, row, zero + EVERY_BLOCK], axis=1)
        return Splits(parts.astype(jnp.int32), jnp.stack([row, row, zero + batch], axis=1).astype(jnp.int32))
    blocks = row_blocks(start, length, block, first, sliding_window)
    ends = jnp.cumsum(jnp.where(blocks > 0, blocks + ROW_OVERHEAD // block, 0))
    begins = ends - blocks
    share = jnp.maximum((ends[-1] + num_parts - 1) // num_parts, 1)
    low = (jnp.arange(num_parts) * share)[:, None]
    high = low + share
    # A part works on the rows whose blocks lie between its two cuts.
    first_row = jnp.sum(ends[None] <= low, axis=1)
    last_row = jnp.sum(begins[None] < high, axis=1) - 1
    inside = jnp.clip(first_row, 0, batch - 1), jnp.clip(last_row, 0, batch - 1)
    from_block = jnp.maximum(low[:, 0] - begins[inside[0]], 0)
    to_block = jnp.minimum(high[:, 0] - begins[inside[1]], blocks[inside[1]])
    parts = jnp.stack([first_row, from_block, last_row, to_block], axis=1)
    following = jnp.where(blocks > 0, jnp.arange(batch), batch)
    following = jnp.append(lax.cummin(following, reverse=True), batch)[1:]
    first_part, last_part = begins // share, (ends - 1) // share
    rows = jnp.stack([first_part, jnp.where(blocks > 0, last_part, first_part - 1), following], axis=1)
    return Splits(parts.astype(jnp.int32), rows.astype(jnp.int32))
