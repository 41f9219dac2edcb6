"""FP8 weights with a scale for each block, as DeepSeek-V3 stores them: config, pairing and exact dequantisation.

`X.weight` is e4m3, `X.weight_scale_inv` is what to multiply its blocks by: float32, bfloat16 or e8m0 (powers of two).
Element (i, j) belongs to block (i // rows, j // columns), where the size comes from config.json and never from the
shapes: the last block of an axis may be partial.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.files import CheckpointError
from jaxspec.checkpoint.shards import DTYPES, StoredTensor

FP8, E8M0 = DTYPES["F8_E4M3"], DTYPES["F8_E8M0"]
SCALE_SUFFIX = "_scale_inv"
_SCALE_DTYPES = (DTYPES["F32"], DTYPES["BF16"], E8M0)
# Keys of quantization_config with what can be honoured; None is an absent key.
_HONOURED = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": (None, "float", "ue8m0"),
    "expert_dtype": (None, "fp8"),
    "dequantize": (None, False),
    "modules_to_convert": (None,),
}
# Which modules are in FP8 shows in what is stored, so lists of those that are not say nothing new.
_LISTS = {"modules_to_not_convert", "ignored_layers"}
# Every value of e4m3, by its byte.
_VALUES = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)


def read_block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block of scales, from the `quantization_config` of a config.json; None without one.

    Raises:
        ValueError: another quantisation than FP8 by blocks with activations quantised on the fly.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    remedy = "use the release in FP8 by blocks, or one in bfloat16"
    if not isinstance(quantization, dict):
        raise ValueError(f"quantization_config: got {quantization!r:.80}, expected an object or null: {remedy}")
    for key, honoured in _HONOURED.items():
        if quantization.get(key) not in honoured:
            raise ValueError(
                f"quantization_config: {key}: got {quantization.get(key)!r:.80}, expected one of {honoured}: {remedy}"
            )
    size = quantization.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and 1 <= n < 2**31 for n in size):
        raise ValueError(
            f"quantization_config: weight_block_size: got {size!r:.80}, expected [rows, columns] of a block: {remedy}"
        )
    unknown = sorted(quantization.keys() - _HONOURED.keys() - _LISTS - {"weight_block_size"})
    if unknown:
        raise ValueError(f"quantization_config: got keys this library does not know, {unknown}: {remedy}")
    return size[0], size[1]


def split_scales(
    folder: Path, stored: Mapping[str, StoredTensor], block: tuple[int, int] | None
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Parts the stored tensors into weights, and the scales of those in FP8, by the weight's name.

    Raises:
        CheckpointError: FP8 weights and scales do not match one to one, a scale has the wrong shape or dtype, or
            config.json does not say what a block is.
    """
    weights = {name: tensor for name, tensor in stored.items() if not name.endswith(SCALE_SUFFIX)}
    scales = {name.removesuffix(SCALE_SUFFIX): x for name, x in stored.items() if name.endswith(SCALE_SUFFIX)}
    quantized = {name for name, tensor in weights.items() if tensor.dtype == FP8}
    for name in sorted(scales.keys() - quantized):
        got = f"{name} in {weights[name].dtype}" if name in weights else f"no {name}"
        raise CheckpointError(
            f"{scales[name].file}: {name}{SCALE_SUFFIX}: got {got}, expected a weight in F8_E4M3 that it scales: "
            "fetch the shards of one revision"
        )
    for name in sorted(quantized - scales.keys()):
        raise CheckpointError(
            f"{weights[name].file}: {name}: got F8_E4M3, expected {name}{SCALE_SUFFIX} beside it: fetch the missing "
            "shards, or use a release with scales by blocks"
        )
    if quantized and block is None:
        raise CheckpointError(
            f"{folder / 'config.json'}: got no quantization_config, expected one, for {min(quantized)} is F8_E4M3: "
            "fetch config.json and weights of one revision"
        )
    for name, scale in scales.items():
        _check_scale(name, weights[name], scale, block)
    for name, tensor in weights.items():
        if tensor.dtype == E8M0:
            raise CheckpointError(
                f"{tensor.file}: {name}: got F8_E8M0, which only scales can be: use a release in FP8 by blocks"
            )
    return weights, scales


def _check_scale(name: str, weight: StoredTensor, scale: StoredTensor, block: tuple[int, int]) -> None:
    if len(weight.shape) != 2:
        raise CheckpointError(
            f"{weight.file}: {name}: got F8_E4M3 of shape {weight.shape}, expected a matrix: use a release whose "
            "experts are stored one by one"
        )
    expected = tuple(-(-size // of) for size, of in zip(weight.shape, block, strict=True))
    if scale.shape != expected or scale.dtype not in _SCALE_DTYPES:
        raise CheckpointError(
            f"{scale.file}: {name}{SCALE_SUFFIX}: got {scale.dtype} of shape {scale.shape}, expected shape "
            f"{expected}, for {weight.shape} in blocks of {block}, in F32, BF16 or F8_E8M0: fetch config.json and "
            "weights of one revision"
        )


def dequantize_blocks(values: np.ndarray, scales: np.ndarray, block: tuple[int, int], out: np.ndarray) -> None:
    """Writes FP8 values times the scales of their blocks: multiplied in float32, rounded once to the dtype of `out`.

    A block has 256 possible values at most, so each is computed once and looked up: this is about three times as fast
    as casting and multiplying every element.

    Args:
        values: [rows, columns] of e4m3, from the start of a block on.
        scales: float32, a scale for each block.
        block: rows and columns of a block.
        out: [rows, columns], of any strides.
    """
    rows, columns = block
    codes, out, dtype = values.view(np.uint8), _as_bits(out), out.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        tables = _as_bits((scales[..., None] * _VALUES).astype(dtype))
    for i, j in np.ndindex(scales.shape):
        at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        # Any byte is in range; "clip" spares the check.
        out[at] = tables[i, j].take(codes[at], mode="clip")


def _as_bits(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers, which NumPy copies much faster than dtypes that are not its own."""
    return array.view(f"u{array.dtype.itemsize}")
