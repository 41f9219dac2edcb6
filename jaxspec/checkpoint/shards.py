"""The stored tensors of a folder: safetensors headers and the shard index, checked in full before any use.

Headers are parsed here, because the format's own NumPy front end knows no bfloat16 or FP8, and because what it
would report of a damaged file names neither the file nor the remedy. The format:
github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.files import (
    MAX_JSON_BYTES,
    CheckpointError,
    file_exists,
    parse_json_object,
    read_json_object,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Stored dtypes that can be read, by the format's names.
DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
# The format's own limit. A corrupt length is a random 64-bit number, so this catches nearly all of them.
MAX_HEADER_BYTES = MAX_JSON_BYTES
# No weight has more axes. A product of a million hostile sizes would take minutes.
_MAX_AXES = 8
_REFETCH = "fetch the file again"
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth"}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One stored tensor: where it lies. Nothing is read until it is asked for, and any number of threads may ask.

    Files are read rather than mapped: the pages of a mapped file count as this process's memory.

    Attributes:
        file: the safetensors file.
        dtype: as stored.
        shape: as stored.
        offset: of its first byte, from the start of the file.
    """

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """The whole tensor.

        Raises:
            CheckpointError: the file has become shorter.
        """
        return self.read_rows(0, self.shape[0]) if self.shape else self._read((), 0)

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """What `read()[start:stop]` would be, without reading the rest.

        Raises:
            CheckpointError: the file has become shorter.
        """
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return self._read((max(stop - start, 0), *self.shape[1:]), start * row)

    def _read(self, shape: tuple[int, ...], skip: int) -> np.ndarray:
        array = np.empty(shape, self.dtype)
        read_into(self.file, self.offset + skip, array.reshape(-1).view(np.uint8))
        return array


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's `model.safetensors`, or of the shards that its index names.

    Raises:
        CheckpointError: there is no safetensors file; a file is damaged; or index and shards disagree, be it
            that a shard is missing, lacks a tensor placed in it, or holds one that is not.
    """
    if file_exists(folder / INDEX_FILE):
        return _read_indexed(folder)
    if file_exists(folder / SINGLE_FILE):
        return read_shard(folder / SINGLE_FILE)
    raise CheckpointError(f"{folder}: {_why_no_weights(folder)}")


def _why_no_weights(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    stray = [name for name in names if name.endswith(".safetensors")]
    pickled = [name for name in names if Path(name).suffix in _PICKLE_SUFFIXES]
    if stray:
        return f"got {stray[0]} without {INDEX_FILE}, which says what the shards hold: fetch the index too"
    if pickled:
        return (
            f"got pickled weights ({pickled[0]}), expected safetensors: convert them, for unpickling can run any code"
        )
    return f"no weights: expected {SINGLE_FILE}, or {INDEX_FILE} and the shards it names"


def _read_indexed(folder: Path) -> dict[str, StoredTensor]:
    placed = _read_index(folder / INDEX_FILE)
    if SINGLE_FILE not in placed and file_exists(folder / SINGLE_FILE):
        raise CheckpointError(
            f"{folder}: got both {SINGLE_FILE} and an {INDEX_FILE} without it: remove the stale one"
        )
    tensors: dict[str, StoredTensor] = {}
    for shard, expected in sorted(placed.items()):
        tensors |= _read_placed(folder / shard, expected, placed)
    return tensors


def _read_placed(file: Path, expected: set[str], placed: dict[str, set[str]]) -> dict[str, StoredTensor]:
    """One shard, which must hold exactly the tensors the index places in it."""
    if not file_exists(file):
        raise CheckpointError(
            f"{file}: missing, but {INDEX_FILE} places {len(expected)} tensors in it, {min(expected)} among them: "
            "fetch the missing shard"
        )
    stored = read_shard(file)
    one_revision = "fetch the index and the shards of one revision"
    for name in sorted(expected - stored.keys()):
        raise CheckpointError(f"{file}: lacks {name}, which {INDEX_FILE} places in it: {one_revision}")
    for name in sorted(stored.keys() - expected):
        place = next((shard for shard, names in placed.items() if name in names), "nowhere")
        raise CheckpointError(f"{file}: holds {name}, which {INDEX_FILE} places in {place}: {one_revision}")
    return stored


def _read_index(file: Path) -> dict[str, set[str]]:
    """The names of the tensors that the index places in each shard."""
    weight_map = read_json_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: got weight_map {weight_map!r:.80}, expected tensor names to shard names")
    placed: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        # An index must not reach out of its folder.
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\:]+\.safetensors", shard):
            raise CheckpointError(
                f"{file}: {name}: got shard {shard!r}, expected the plain name of a .safetensors file in the folder"
            )
        placed.setdefault(shard, set()).add(name)
    return placed


def read_shard(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, from its header alone.

    Raises:
        CheckpointError: the file may not be opened, is cut short or damaged, or a tensor's dtype cannot be read.
    """
    if not file_exists(file):
        raise CheckpointError(f"{file}: no such file: fetch it")
    header, start = _read_header(file)
    header.pop("__metadata__", None)
    size = file.stat().st_size
    tensors = {name: _check_entry(file, name, entry, start) for name, entry in header.items()}
    _check_layout(file, tensors, start, size)
    return tensors


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header and the offset of the first byte after it."""
    size = file.stat().st_size
    prefix = np.zeros(min(size, 8), np.uint8)
    read_into(file, 0, prefix)
    length = int.from_bytes(prefix.tobytes(), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{file}: got {size} bytes with a header of {length}, expected a header that fits the file and "
            f"{MAX_HEADER_BYTES} bytes: not a safetensors file, or cut short; {_REFETCH}"
        )
    header = np.zeros(length, np.uint8)
    read_into(file, 8, header)
    return parse_json_object(header.tobytes(), f"{file}: header"), 8 + length


def read_into(file: Path, offset: int, buffer: np.ndarray) -> None:
    """Fills a buffer of bytes from `offset` on, without holding the interpreter's lock. Shards are read here only.

    Raises:
        CheckpointError: the file ends before.
    """
    with file.open("rb", buffering=0) as opened:
        opened.seek(offset)
        done = 0
        while done < len(buffer):
            count = opened.readinto(buffer[done:].data)
            if not count:
                raise CheckpointError(
                    f"{file}: got {offset + done} bytes, expected {offset + len(buffer)} at least, as it had when it "
                    f"was opened: {_REFETCH}, and leave it alone while it is read"
                )
            done += count


def _check_entry(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
    """A header entry whose shape, dtype and offsets agree, in Python integers: nothing overflows."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not _are_sizes(shape, _MAX_AXES) or not _are_sizes(offsets, 2) or len(offsets) != 2:
        raise CheckpointError(
            f"{file}: {name}: got header entry {entry!r:.200}, expected dtype, shape (of {_MAX_AXES} axes at most) "
            f"and two data_offsets: {_REFETCH}"
        )
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{file}: {name}: got dtype {dtype!r:.80}, expected one of {', '.join(DTYPES)}")
    got, expected = offsets[1] - offsets[0], math.prod(shape) * DTYPES[dtype].itemsize
    if got != expected:
        raise CheckpointError(
            f"{file}: {name}: got data_offsets {offsets}, {got} bytes, expected {expected} for {dtype} {shape}: "
            f"{_REFETCH}"
        )
    return StoredTensor(file, DTYPES[dtype], tuple(shape), start + offsets[0])


def _are_sizes(values: Any, most: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(type(value) is int and value >= 0 for value in values)
    )


def _check_layout(file: Path, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    """The tensors must fill the data without gap or overlap, and the file must end where they do."""
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            kind = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            got, expected = tensor.offset - start, end - start
            raise CheckpointError(f"{file}: {name} {kind}: got offset {got}, expected {expected}: {_REFETCH}")
        end += tensor.nbytes
    if size != end:
        kind = "cut short" if size < end else "bytes beyond the last tensor"
        raise CheckpointError(f"{file}: {kind}: got {size} bytes, expected {end}: {_REFETCH}")
