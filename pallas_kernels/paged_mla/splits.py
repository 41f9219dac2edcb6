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

BLOCK_TOKENS = 64  # cache positions that the kernel scores at a time
ROW_OVERHEAD = 5  # what starting a row costs, in blocks (FlashMLA's value; not measured here)


class Splits(NamedTuple):
    """Who attends to what; made once per round, shared by all layers. Blocks count from the first one a row sees."""

    parts: Int[Array, "p 4"]  # first row, its first block, last row, the block it ends before
    rows: Int[Array, "b 3"]  # of each row: first part, last part (below the first: no work), the next row with work


def row_blocks(start: Int[Array, "*b"], length: Int[Array, "*b"], first: int) -> Int[Array, "*b"]:
    """How many blocks of `BLOCK_TOKENS` positions a row's queries see; 0 without queries."""
    blocks = (start + length + BLOCK_TOKENS - 1) // BLOCK_TOKENS - first // BLOCK_TOKENS
    return jnp.where(length > 0, jnp.maximum(blocks, 0), 0)


def make_splits(start: Int[Array, "b"], length: Int[Array, "b"], num_parts: int, first: int = 0) -> Splits:
    """The split table of a batch.

    Args:
        start: position of each row's first query.
        length: queries of each row.
        num_parts: parts to fill, the streaming multiprocessors divided by the row tiles.
        first: positions below it are seen by no query.
    """
    blocks = row_blocks(start, length, first)
    ends = jnp.cumsum(jnp.where(blocks > 0, blocks + ROW_OVERHEAD, 0))
    begins = ends - blocks
    share = jnp.maximum((ends[-1] + num_parts - 1) // num_parts, 1)
    low = (jnp.arange(num_parts) * share)[:, None]
    high = low + share
    # A part works on the rows whose blocks lie between its two cuts.
    first_row = jnp.sum(ends[None] <= low, axis=1)
    last_row = jnp.sum(begins[None] < high, axis=1) - 1
    batch = blocks.shape[0]
    inside = jnp.clip(first_row, 0, batch - 1), jnp.clip(last_row, 0, batch - 1)
    from_block = jnp.maximum(low[:, 0] - begins[inside[0]], 0)
    to_block = jnp.minimum(high[:, 0] - begins[inside[1]], blocks[inside[1]])
    parts = jnp.stack([first_row, from_block, last_row, to_block], axis=1)
    following = jnp.where(blocks > 0, jnp.arange(batch), batch)
    following = jnp.append(lax.cummin(following, reverse=True), batch)[1:]
    first_part, last_part = begins // share, (ends - 1) // share
    rows = jnp.stack([first_part, jnp.where(blocks > 0, last_part, first_part - 1), following], axis=1)
    return Splits(parts.astype(jnp.int32), rows.astype(jnp.int32))
