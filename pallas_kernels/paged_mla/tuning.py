"""Tile configurations of the Mosaic kernel. From the roofline of an H200; not measured."""

from __future__ import annotations

from typing import NamedTuple

NUM_SMS = 132  # streaming multiprocessors of an H100 or H200 (SXM)


class TileConfig(NamedTuple):
    """How the kernel cuts its work, for calls of up to `max_rows` rows (query tokens * heads)."""

    max_rows: int
    page_size: int
    dtype: str
    row_tile: int  # rows of a tile; each tile reads the cache again, from L2 with luck
    block_tokens: int  # positions scored at a time
    stages: int  # blocks in shared memory


# Up to 64 rows the cache's bandwidth is the limit, and a block is 74 kB: two fill shared memory beside the queries.
# From 97 rows on the tensor cores are; a tile of 128 rows, which two warpgroups' registers cannot hold, would save
# reads only. Above 1024 rows it is prefill, another kernel's work.
CONFIGS = tuple(
    TileConfig(rows, page_size, "bfloat16", row_tile=64, block_tokens=64, stages=2)
    for rows in (64, 1024)
    for page_size in (16, 32, 64, 128)
)


def tile_config(rows: int, page_size: int, dtype: str) -> TileConfig | None:
    """The configuration for a call, or None where the table has none."""
    for config in CONFIGS:
        if rows <= config.max_rows and (page_size, dtype) == (config.page_size, config.dtype):
            return config
    return None
