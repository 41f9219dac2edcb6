"""Reads a Hugging Face folder into parameters, the inverse of the writer.

Strict both ways: every declared weight is found with its shape, and every stored tensor is used. Everything is
checked, from headers alone, before the first array is allocated; each array is then filled by threads that hold a few
megabytes of the file at a time, so loading takes little more memory than its result.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array
from tqdm.auto import tqdm

from jaxspec.checkpoint.files import CheckpointError, file_exists, read_json_object
from jaxspec.checkpoint.quantization import FP8, dequantize_blocks, read_block_size, split_scales
from jaxspec.checkpoint.shards import DTYPES, StoredTensor, read_tensors
from jaxspec.config import ModelConfig
from jaxspec.models.block_scaled import BlockScaled
from jaxspec.models.params import Params, Weight, param_specs

Stored = dict[str, StoredTensor]
WeightFormat = Literal["dequantized", "fp8"]
# Dtypes that weights can be cast to.
_WEIGHT_DTYPES = tuple(DTYPES[name] for name in ("BF16", "F16", "F32"))
# What a thread reads of a tensor at once. By less, transposed rows are written in strips too short for the memory.
_CHUNK_BYTES = 2 << 20
# Bytes from which on a call of XLA's transposition is worth it.
_LARGE = 1 << 16
# Where a config promises this many times what is stored, not every missing tensor is looked up.
_MOST_MISSING = 4
# Buffers that old releases store, and that follow from config.json.
_IGNORED = r".*\.rotary_emb\.inv_freq"


class _Plan(NamedTuple):
    """How a weight is read: its dtype, whether it stays in FP8, and the axes of the array in stored order.

    `axes` is None where the array is not a permutation of the stored tensor's axes but a part of it, say.
    """

    dtype: np.dtype
    scaled: bool
    axes: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint that has been checked in full, from its headers, and of which any part can be read.

    Attributes:
        folder: where it lies.
        config: the architecture.
        specs: the declaration of every weight it holds.
        own_mtp_embed: the MTP modules have an embedding of their own.
        own_mtp_head: the MTP modules have an output head of their own.
    """

    folder: Path
    config: ModelConfig
    specs: Params
    own_mtp_embed: bool
    own_mtp_head: bool
    _stored: Stored
    _scales: Stored
    _block: tuple[int, int] | None
    _plans: dict[Weight, _Plan]
    _pool: concurrent.futures.ThreadPoolExecutor = dataclasses.field(
        default_factory=concurrent.futures.ThreadPoolExecutor
    )
    _whole_tensor: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Bytes of the files that reading every weight reads."""
        return sum(self._nbytes(name) for weight in jax.tree.leaves(self.specs) for _, name in weight.tensors())

    def target(self, weight: Weight) -> tuple[np.dtype, bool]:
        """The dtype that a weight is read in, and whether it stays `BlockScaled`."""
        return self._plans[weight][:2]

    def read(
        self, weight: Weight, layer: int | None = None, advance: Callable[[int], object] | None = None
    ) -> np.ndarray | BlockScaled:
        """Reads a weight's array, or a `BlockScaled` of NumPy arrays, on several threads.

        Args:
            weight: one of `specs`.
            layer: read only what is at this index of the first stacked axis.
            advance: called with the bytes of the file that each tensor took.

        Raises:
            CheckpointError: a file has become shorter since it was opened.
        """
        tensors, shape = weight.tensors(), weight.shape
        if layer is not None:
            each, shape = math.prod(len(ids) for _, ids in weight.stack[1:]), shape[1:]
            layers = itertools.islice(tensors, layer * each, (layer + 1) * each)
            tensors = ((index[1:], name) for index, name in layers)
        array = self._allocate(weight, shape)
        jobs = [(name, array[index]) for index, name in tensors]
        for nbytes in self._pool.map(lambda job: self._fill(weight, *job), jobs):
            if advance is not None:
                advance(nbytes)
        return array

    def _nbytes(self, name: str) -> int:
        return self._stored[name].nbytes + (self._scales[name].nbytes if name in self._scales else 0)

    def _allocate(self, weight: Weight, shape: tuple[int, ...]) -> np.ndarray | BlockScaled:
        dtype, scaled, _ = self._plans[weight]
        if not scaled:
            return _aligned_empty(shape, dtype)
        block = self._block[1], self._block[0]
        blocks = tuple(-(-size // of) for size, of in zip(shape[-2:], block, strict=True))
        scales = _aligned_empty((*shape[:-2], *blocks), np.float32)
        return BlockScaled(_aligned_empty(shape, np.uint8), scales, block)

    def _fill(self, weight: Weight, name: str, part: np.ndarray | BlockScaled) -> int:
        """Reads one tensor to its place in the array, and gives its bytes."""
        tensor, scales, axes = self._stored[name], self._read_scales(name), self._plans[weight].axes
        if isinstance(part, BlockScaled):
            part.scales[...] = scales.T
            part, scales = part.codes.view(FP8), None
        if axes is not None:
            self._copy(tensor, scales, part.transpose(axes))
            return self._nbytes(name)
        with self._whole_tensor:
            whole = np.empty(tensor.shape, part.dtype)
            self._copy(tensor, scales, whole)
            _copy_bits(weight.view(whole), part)
        return self._nbytes(name)

    def _read_scales(self, name: str) -> np.ndarray | None:
        return self._scales[name].read().astype(np.float32) if name in self._scales else None

    def _copy(self, tensor: StoredTensor, scales: np.ndarray | None, out: np.ndarray) -> None:
        """Casts or dequantises a tensor to `out`, which has its shape and any strides, by a few rows at a time."""
        unit = 1 if scales is None else self._block[0]
        rows = max(_CHUNK_BYTES * len(out) // max(tensor.nbytes, 1) // unit, 1) * unit
        for start in range(0, len(out), rows):
            values, to = tensor.read_rows(start, start + rows), out[start : start + rows]
            if scales is None:
                _copy_bits(values if values.dtype == to.dtype else values.astype(to.dtype), to)
            else:
                of_rows = scales[start // unit : -(-(start + rows) // unit)]
                dequantize_blocks(values, of_rows, self._block, to)


def _aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Like `np.empty`, at an address from which JAX takes an array over on the CPU without copying it."""
    nbytes, alignment = math.prod(shape) * np.dtype(dtype).itemsize, 64
    buffer = np.empty(nbytes + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def _copy_bits(source: np.ndarray, out: np.ndarray) -> None:
    """Copies between arrays of one dtype and shape and any strides.

    XLA transposes up to twice as fast as NumPy, and as integers NumPy copies what is not its own dtype.
    """
    order = sorted(range(out.ndim), key=lambda axis: -out.strides[axis])
    source, out = (x.view(f"u{x.dtype.itemsize}").transpose(order) for x in (source, out))
    if not source.flags.c_contiguous and source.nbytes >= _LARGE and (host := _host_device()) is not None:
        source = np.asarray(jax.device_put(source, host))
    out[...] = source


@functools.cache
def _host_device() -> jax.Device | None:
    """The CPU as a device, unless JAX was told to do without."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def load(
    path: str | Path,
    dtype: Any = None,
    *,
    widen: bool = True,
    weight_format: WeightFormat = "dequantized",
    sharding: Callable[[Weight], Sharding] | None = None,
    use_tqdm: bool | None = None,
) -> tuple[ModelConfig, Params]:
    """Loads a model from a local folder of `config.json` and safetensors. See `jaxspec.checkpoint.load`."""
    opened = open_checkpoint(path, dtype, widen=widen, weight_format=weight_format)
    hidden = None if use_tqdm is None else not use_tqdm
    on_host = sharding is None and jax.default_backend() == "cpu"
    with tqdm(total=opened.nbytes, desc="Loading", unit="B", unit_scale=True, disable=hidden) as bar:

        def place(weight: Weight) -> Array | BlockScaled:
            if on_host:
                return jax.tree.map(jax.device_put, opened.read(weight, advance=bar.update))
            return _stream(opened, weight, sharding and sharding(weight), bar.update)

        return opened.config, jax.tree.map(place, opened.specs)


def _stream(
    opened: Opened, weight: Weight, sharding: Sharding | None, advance: Callable[[int], object]
) -> Array | BlockScaled:
    """Writes a weight to its devices, one index of the first stacked axis after another."""
    shardings = [sharding, of_axes(sharding, 0, len(weight.stack))]
    if not weight.stack:
        leaves, tree = jax.tree.flatten(opened.read(weight, advance=advance))
        return jax.tree.unflatten(tree, [jax.device_put(x, s) for x, s in zip(leaves, shardings, strict=False)])
    whole: list[Array] = []
    for layer in range(weight.shape[0]):
        parts, tree = jax.tree.flatten(opened.read(weight, layer, advance))
        if not whole:
            whole = [
                jax.jit(functools.partial(jnp.zeros, (weight.shape[0], *part.shape), part.dtype), out_shardings=s)()
                for part, s in zip(parts, shardings, strict=False)
            ]
        for i, part in enumerate(parts):
            here = jax.device_put(part, of_axes(shardings[i], 1, None))
            whole[i] = _writer(shardings[i])(whole[i], here, layer)
    return jax.tree.unflatten(tree, whole)


def of_axes(sharding: Sharding | None, start: int, stop: int | None) -> Sharding | None:
    """The sharding of an array with only some of the axes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[start:stop]), memory_kind=sharding.memory_kind)


@functools.cache
def _writer(sharding: Sharding | None) -> Callable[[Array, Array, int], Array]:
    """A program that writes a part into an array in place."""

    def write(whole: Array, part: Array, index: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(whole, part, index, 0)

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


def open_checkpoint(
    path: str | Path, dtype: Any = None, *, widen: bool = True, weight_format: WeightFormat = "dequantized"
) -> Opened:
    """Opens and checks a checkpoint without reading its weights, but for copies that an MTP module may store.

    Args and errors are those of `load`.
    """
    target = None if dtype is None else weight_dtype(dtype)
    if weight_format not in ("dequantized", "fp8"):
        raise ValueError(f"weight_format: got {weight_format!r}, expected 'dequantized' or 'fp8'")
    folder = Path(path)
    config, block = _read_configs(folder)
    stored, scales = split_scales(folder, read_tensors(folder), block)
    stored = _without_ignored(config, stored)
    _check_counts(folder, config, stored)
    own, stored = _without_copies(folder, config, stored)
    specs = param_specs(config, own_mtp_embed=own[0], own_mtp_head=own[1])
    _check_names(folder, config, specs, stored)
    weights = jax.tree.leaves(specs)
    for weight in weights:
        _check_shapes(weight, stored)
    if target is None:
        target = _common_dtype(folder, weights, stored)
    plans = {weight: _plan(weight, stored, target, widen, weight_format == "fp8") for weight in weights}
    if weight_format == "fp8" and not any(plan.scaled for plan in plans.values()):
        raise CheckpointError(
            f"{folder}: got no matrix stored in F8_E4M3, expected some for weight_format 'fp8': leave weight_format "
            "at 'dequantized', or load the release in FP8"
        )
    return Opened(folder, config, specs, *own, stored, scales, block, plans)


def read_config(folder: Path) -> ModelConfig:
    """The architecture in `config.json`, with the end-of-sequence ids of `generation_config.json` where it has any.

    Raises:
        CheckpointError: the folder or the file is missing, or its content is refused.
    """
    return _read_configs(folder)[0]


def _read_configs(folder: Path) -> tuple[ModelConfig, tuple[int, int] | None]:
    """The architecture, and the size of a block of FP8 scales."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder: expected a local one with config.json and safetensors; a model of the hub "
            "has to be downloaded first"
        )
    file, generation = folder / "config.json", folder / "generation_config.json"
    if not file_exists(file):
        raise CheckpointError(f"{folder}: no config.json: expected the folder of a Hugging Face checkpoint")
    config, generation_config = read_json_object(file), None
    if file_exists(generation):
        generation_config = read_json_object(generation)
    try:
        block = read_block_size(config)
        config.pop("quantization_config", None)
        return ModelConfig.from_hf(config, generation_config), block
    except (ValueError, OverflowError) as error:  # An integer may be beyond every float.
        raise CheckpointError(f"{file}: {error}") from error


def _plan(weight: Weight, stored: Stored, target: np.dtype, widen: bool, keep: bool) -> _Plan:
    dtypes = {stored[name].dtype for _, name in weight.tensors()}
    axes = _stored_axes(weight)
    if weight.dtype is not None:
        return _Plan(np.dtype(weight.dtype), False, axes)
    if keep and dtypes == {FP8} and axes == (1, 0):
        return _Plan(FP8, True, axes)
    only = dtypes.pop()
    narrower = not dtypes and only != FP8 and only.itemsize < target.itemsize
    return _Plan(only if narrower and not widen else target, False, axes)


def _stored_axes(weight: Weight) -> tuple[int, ...] | None:
    """For every axis of the stored tensor the axis of the array that it is, by a probe of the declared view."""
    probe = np.empty(weight.hf_shape, np.bool_)
    ours, theirs = (list(zip(x.strides, x.shape, strict=True)) for x in (weight.view(probe), probe))
    if sorted(ours) != sorted(theirs):
        return None
    order = sorted(range(probe.ndim), key=ours.__getitem__)
    return tuple(order[rank] for rank in np.argsort(sorted(range(probe.ndim), key=theirs.__getitem__)))


def weight_dtype(dtype: Any) -> np.dtype:
    """The dtype that weights are to have, of anything that names one.

    Raises:
        ValueError: it is none that weights can be cast to.
    """
    try:
        target = jnp.dtype(dtype)
    except TypeError:
        target = dtype
    if target not in _WEIGHT_DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, expected one of {', '.join(map(str, _WEIGHT_DTYPES))}")
    return target


def _without_ignored(config: ModelConfig, stored: Stored) -> Stored:
    """The stored tensors less those that are known and not needed."""
    ignored = re.compile(f"{_IGNORED}|{config.ignored_tensors}" if config.ignored_tensors else _IGNORED)
    return {name: tensor for name, tensor in stored.items() if not ignored.fullmatch(name)}


def _check_counts(folder: Path, config: ModelConfig, stored: Stored) -> None:
    """Refuses sizes that what is stored cannot have, before anything counts up to them."""
    elements = sum(math.prod(tensor.shape) for tensor in stored.values())
    for name, got, most, what in (
        ("num_hidden_layers", config.num_layers, len(stored), "tensors"),
        ("num_nextn_predict_layers", config.num_mtp_layers, len(stored), "tensors"),
        ("n_routed_experts", config.n_routed_experts, elements, "elements"),
    ):
        if got > most:
            raise CheckpointError(
                f"{folder}: config.json has {name} {got}, expected {most} at most, for only {most} {what} are "
                "stored: fetch the missing shards, or the config.json of these weights"
            )


def _without_copies(folder: Path, config: ModelConfig, stored: Stored) -> tuple[tuple[bool, bool], Stored]:
    """Whether the MTP modules have their own embedding and head, and the tensors less repetitions of the trunk's."""
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    every, stored = param_specs(untied, own_mtp_embed=True, own_mtp_head=True), dict(stored)
    embed, head = every.embed.hf_name, every.head.hf_name
    if config.tie_word_embeddings:
        _drop_tied_head(stored, head, embed)
        head = embed
    if every.mtp is None:
        return (False, False), stored
    own = [
        copies is not None and _keep_own_copies(folder, stored, copies, trunk)
        for copies, trunk in ((every.mtp.embed, embed), (every.mtp.head, head))
    ]
    return (own[0], own[1]), stored


def _drop_tied_head(stored: Stored, head: str, embed: str) -> None:
    tensor = stored.pop(head, None)
    if tensor is not None and not _equal(tensor, stored.get(embed)):
        raise CheckpointError(
            f"{tensor.file}: got a {head} that differs from {embed}, expected none or the same, for config.json has "
            "tie_word_embeddings true: set it to false, or fetch config.json and weights of one revision"
        )


def _keep_own_copies(folder: Path, stored: Stored, copies: Weight, trunk: str) -> bool:
    """Whether the MTP modules' copies of a trunk tensor are to be used. They are dropped when all repeat it."""
    names = [name for _, name in copies.tensors()]
    absent = [name for name in names if name not in stored]
    if 0 < len(absent) < len(names):
        raise CheckpointError(
            f"{folder}: got {len(names) - len(absent)} of the {len(names)} MTP modules' copies of {trunk}, expected "
            f"all or none: {_listed(absent)} missing: fetch the missing shards, or remove the other copies"
        )
    if not absent and not all(_equal(stored[name], stored.get(trunk)) for name in names):
        return True
    for name in names:
        stored.pop(name, None)
    return False


def _equal(one: StoredTensor, other: StoredTensor | None) -> bool:
    """Whether two tensors hold the same values, compared by blocks: neither is ever whole in memory.

    What is in FP8 counts as different, for its values depend on its scales.
    """
    if other is None or one.shape != other.shape or FP8 in (one.dtype, other.dtype):
        return False
    rows = max(_CHUNK_BYTES * one.shape[0] // max(one.nbytes, 1), 1)
    return all(
        np.array_equal(*(x.read_rows(start, start + rows).astype(np.float32) for x in (one, other)))
        for start in range(0, one.shape[0], rows)
    )


def _check_names(folder: Path, config: ModelConfig, specs: Params, stored: Stored) -> None:
    """What is declared and what is stored must be the same set of tensors."""
    weights = jax.tree.leaves(specs)
    counts = {(weight.hf_name, weight.stack): math.prod(len(ids) for _, ids in weight.stack) for weight in weights}
    declared = sum(counts.values())
    if declared > _MOST_MISSING * len(stored):
        # One of the first len(stored) + 1 names is missing, so this looks at no more.
        first = next(name for name in _iterate_names(weights) if name not in stored)
        raise CheckpointError(
            f"{folder}: got {len(stored)} tensors, expected {declared} by config.json, {first} among them: fetch the "
            "missing shards, or the config.json of these weights"
        )
    expected = set(_iterate_names(weights))
    if specs.mtp is not None and stored.keys().isdisjoint(_iterate_names(jax.tree.leaves(specs.mtp))):
        raise CheckpointError(
            f"{folder}: config.json promises MTP (num_nextn_predict_layers {config.num_mtp_layers}) but no MTP "
            f"tensor is stored, expected from model.layers.{config.num_layers} on: set num_nextn_predict_layers to 0 "
            "in config.json to do without, or fetch the missing shards"
        )
    missing, unused = sorted(expected - stored.keys()), sorted(stored.keys() - expected)
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(expected)} expected tensors are not stored: {_listed(missing)}: "
            "fetch the missing shards, or the config.json of these weights"
        )
    if unused:
        advice = "fetch the config.json of these weights"
        if any(name.startswith(f"model.layers.{config.num_cached_layers}.") for name in unused):
            advice += ", or correct its num_hidden_layers or num_nextn_predict_layers"
        raise CheckpointError(
            f"{folder}: {len(unused)} stored tensors are no part of the model in config.json: {_listed(unused)}: "
            f"{advice}"
        )


def _check_shapes(weight: Weight, stored: Stored) -> None:
    for _, name in weight.tensors():
        got = stored[name].shape
        if got != weight.hf_shape:
            raise CheckpointError(
                f"{stored[name].file}: {name}: got shape {got}, expected {weight.hf_shape}: "
                "fetch config.json and weights of one revision"
            )


def _common_dtype(folder: Path, weights: list[Weight], stored: Stored) -> np.dtype:
    """The one dtype of all weights that have none of their own and are not in FP8."""
    names = sorted(set(_iterate_names(weight for weight in weights if weight.dtype is None)))
    examples = {stored[name].dtype: name for name in names if stored[name].dtype != FP8}
    if len(examples) > 1:
        kinds = ", ".join(f"{name} in {dtype}" for dtype, name in examples.items())
        raise CheckpointError(f"{folder}: got {kinds}, expected one dtype: pass dtype to load the weights as one")
    return next(iter(examples))


def _iterate_names(weights: Iterable[Weight]) -> Iterator[str]:
    """The names of all stored tensors. One that holds several weights comes several times."""
    return (name for weight in weights for _, name in weight.tensors())


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
