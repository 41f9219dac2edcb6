"""Matrices kept in FP8, a float32 scale for each block, and their products with activations.

The format is DeepSeek-V3's (report, section 3.3.2): element (i, j) is value (i, j) times the scale of block
(i // rows, j // columns), the last block of an axis partial where the sizes do not divide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

# Elements of a weight that are spelled out at once: 8 MB in bfloat16.
_TILE_ELEMENTS = 1 << 22


@struct.dataclass
class BlockScaled:
    """A matrix `[in, out]` in FP8, or a stack of them, that takes an array's place among the parameters.

    The values are held as bytes: XLA's CPU backend slices FP8 by taking the whole array to float16 first, and so
    would spell out a stack of weights for each of its layers.

    Attributes:
        codes: the bytes of the values in e4m3.
        scales: what to multiply each block by.
        block: size of a block along (in, out).
    """

    codes: UInt8[Array | np.ndarray, "*stack fan_in fan_out"]
    scales: Float[Array | np.ndarray, "*stack blocks_in blocks_out"]
    block: tuple[int, int] = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrices that this stands for."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """Number of axes, the stacked ones included."""
        return self.codes.ndim

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the values."""
        return np.dtype(jnp.float8_e4m3fn)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def __getitem__(self, index: Any) -> BlockScaled:
        """Picks from the stacked axes, by traced indices too."""
        codes = self.codes[index]
        if codes.shape[-2:] != self.shape[-2:]:
            raise IndexError(f"got index {index} into {self.shape}, expected one of the {self.ndim - 2} stacked axes")
        return self.replace(codes=codes, scales=self.scales[index])


def dequantize(w: Array | BlockScaled, dtype: Any) -> Array:
    """The whole weight in `dtype`: multiplied in float32 and rounded once. A plain array is cast."""
    if not isinstance(w, BlockScaled):
        return w.astype(dtype)
    scales = w.scales
    for axis, size in zip((-2, -1), w.block, strict=True):
        scales = lax.slice_in_dim(jnp.repeat(scales, size, axis), 0, w.shape[axis], axis=axis)
    values = lax.bitcast_convert_type(w.codes, w.dtype)
    return (values.astype(jnp.float32) * scales).astype(dtype)


def matmul(x: Float[Array, "*b fan_in"], w: Array | BlockScaled) -> Float[Array, "*b fan_out"]:
    """x @ w. Of an FP8 matrix never more than a tile exists in x's dtype.

    Tiles run over the output axis: every output is one dot over the whole of `in`, as it is for a plain array.
    """
    return _by_columns(w, lambda tile: x @ tile, x.dtype) if isinstance(w, BlockScaled) else x @ w


def ragged(
    x: Float[Array, "rows fan_in"], w: Array | BlockScaled, sizes: Int[Array, "groups"]
) -> Float[Array, "rows fan_out"]:
    """`jax.lax.ragged_dot` of rows sorted by group with `[groups, in, out]`; of FP8, by tiles as in `matmul`."""
    if isinstance(w, BlockScaled):
        return _by_columns(w, lambda tile: lax.ragged_dot(x, tile, sizes), x.dtype)
    return lax.ragged_dot(x, w.astype(x.dtype), sizes)


def _by_columns(w: BlockScaled, product: Callable[[Array], Array], dtype: Any) -> Array:
    """The products with tiles of whole block columns, joined."""
    out, column = w.shape[-1], w.block[1]
    width = max(_TILE_ELEMENTS // (w.codes.size // out * column), 1) * column
    if width >= out:
        return product(dequantize(w, dtype))

    def part(start: int | Array, width: int) -> Array:
        codes = lax.dynamic_slice_in_dim(w.codes, start, width, axis=-1)
        scales = lax.dynamic_slice_in_dim(w.scales, start // column, -(-width // column), axis=-1)
        return product(dequantize(w.replace(codes=codes, scales=scales), dtype))

    tiles = lax.map(lambda i: part(i * width, width), jnp.arange(out // width))
    joined = jnp.moveaxis(tiles, 0, -2).reshape(*tiles.shape[1:-1], -1)
    rest = out % width
    return jnp.concatenate([joined, part(out - rest, rest)], axis=-1) if rest else joined
