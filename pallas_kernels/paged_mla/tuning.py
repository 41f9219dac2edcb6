"""Tile configurations of the Mosaic kernels. From the roofline of an H200; not measured."""

from __future__ import annotations

from typing import NamedTuple

NUM_SMS = 132  # streaming multiprocessors of an H100 or H200 (SXM)
WHOLE_TILES = 17  # with as many row tiles, the GPU is full without cutting rows into parts


class TileConfig(NamedTuple):
    """How a kernel cuts calls of up to `max_rows` rows (query tokens * heads of a batch row)."""

    max_rows: int
    dtype: str  # of the latents
    kernel: str  # the module that has it
    row_tile: int  # rows of a tile; each tile reads the cache again, from L2 with luck
    block_tokens: int  # positions attended to at a time
    stages: int  # blocks in shared memory

    def tiles(self, rows: int) -> int:
        """Row tiles of a batch row."""
        return -(-rows // self.row_tile)

    def num_parts(self, rows: int) -> int | None:
        """Parts for a call's work: one for each multiprocessor and row tile. None: each row is a part."""
        tiles = self.tiles(rows)
        return None if tiles >= WHOLE_TILES else max(NUM_SMS // tiles, 1)


# An H200 reads a cached bfloat16 token in the time of 97 rows' products, an FP8 one in that of 55. `few_rows` pays
# for the rows there are, to the next multiple of 8: two of its tiles should take 65 to 96 rows at memory's speed,
# where two of 64 take a third longer. `many_rows` pays for 64, and keeps the tensor cores busy.
FEW, MANY = "few_rows", "many_rows"
CONFIGS = (
    *(TileConfig(rows, "bfloat16", FEW, rows, block_tokens=64, stages=2) for rows in (16, 24, 32, 40, 48)),
    TileConfig(64, "bfloat16", MANY, 64, block_tokens=128, stages=1),
    *(TileConfig(2 * rows, "bfloat16", FEW, rows, block_tokens=64, stages=2) for rows in (40, 48)),
    TileConfig(2**31, "bfloat16", MANY, 64, block_tokens=128, stages=1),
    *(TileConfig(rows, "float8_e4m3fn", FEW, rows, block_tokens=64, stages=2) for rows in (16, 24, 32, 40)),
    TileConfig(2**31, "float8_e4m3fn", FEW, 48, block_tokens=64, stages=2),
)
PAGE_SIZES = (16, 32, 64, 128)


def tile_config(rows: int, page_size: int, dtype: str) -> TileConfig | None:
    """The configuration for a call, or None where the table has none."""
    for config in CONFIGS:
        if rows <= config.max_rows and dtype == config.dtype and page_size in PAGE_SIZES:
            return config
    return None
