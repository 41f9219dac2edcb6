"""Checkpoints in jaxspec's own format: arrays as this library holds them, restored onto any mesh by Orbax.

A store is a folder with the source's config.json, tokenizer and chat template; `jaxspec.json`, which says what it
holds and of what it was made; and `parts/`, an Orbax checkpoint for each layer, and one for what is in no layer.
A part appears whole or not at all, so a conversion that was interrupted goes on after the last one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array
from orbax.checkpoint import v1 as ocp
from tqdm.auto import tqdm

from jaxspec.checkpoint.files import CheckpointError, file_exists, read_json_object
from jaxspec.checkpoint.hub import DESCRIPTION, resolve
from jaxspec.checkpoint.quantization import FP8, read_block_size
from jaxspec.checkpoint.reader import Opened, WeightFormat, of_axes, open_checkpoint, read_config, weight_dtype
from jaxspec.checkpoint.shards import read_tensors
from jaxspec.config import ModelConfig
from jaxspec.models.block_scaled import BlockScaled
from jaxspec.models.params import Params, Weight, param_specs

STORE_FILE = "jaxspec.json"
FORMAT_VERSION = 1
# What a device reads of an array at once: it need not read more than its shard, and a few of these.
_CHUNK_BYTES = 32 << 20
_DTYPES = {"bfloat16", "float16", "float32", FP8.name}
_AGAIN = "convert the source again"
# What jaxspec.json holds.
_KINDS = {
    "format_version": int,
    "complete": bool,
    "source": dict,
    "versions": dict,
    "config_digest": str,
    "weight_format": str,
    "block": list | None,
    "own_mtp_embed": bool,
    "own_mtp_head": bool,
    "dtypes": dict,
    "files": dict,
}


class _Member(NamedTuple):
    """A weight's share of a part: what is at `layer` of its first stacked axis, or all of a weight without one."""

    path: str
    weight: Weight
    layer: int | None


@dataclasses.dataclass(frozen=True)
class _Manifest:
    """jaxspec.json.

    Attributes:
        format_version: of the layout of stores.
        complete: the conversion was not interrupted.
        source: the folder it was made from: its name, and the digest of its config.json and headers.
        versions: of the libraries that made it.
        config_digest: of config.json.
        weight_format: "dequantized" or "fp8", as for `load`.
        block: size of a block of FP8 scales along (in, out).
        own_mtp_embed: the MTP modules have an embedding of their own.
        own_mtp_head: the MTP modules have an output head of their own.
        dtypes: of every weight, by its path among the parameters; float8_e4m3fn is a `BlockScaled`.
        files: bytes of every file of the parts; none before the conversion is complete.
    """

    format_version: int
    complete: bool
    source: dict[str, str]
    versions: dict[str, str]
    config_digest: str
    weight_format: str
    block: list[int] | None
    own_mtp_embed: bool
    own_mtp_head: bool
    dtypes: dict[str, str]
    files: dict[str, int]

    def arrays(self, member: _Member) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a member, by their names in its part."""
        shape = member.weight.shape if member.layer is None else member.weight.shape[1:]
        dtype = jnp.dtype(self.dtypes[member.path])
        if dtype != FP8:
            return {member.path: jax.ShapeDtypeStruct(shape, dtype)}
        codes = jax.ShapeDtypeStruct(shape, jnp.uint8)
        blocks = (-(-size // of) for size, of in zip(shape[-2:], self.block, strict=True))
        scales = jax.ShapeDtypeStruct((*shape[:-2], *blocks), jnp.float32)
        return {f"{member.path}.codes": codes, f"{member.path}.scales": scales}

    def nbytes(self, members: list[_Member]) -> int:
        """Bytes of the arrays of some members."""
        arrays = (array for member in members for array in self.arrays(member).values())
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def is_store(path: str | os.PathLike) -> bool:
    """Whether a folder is a store, be it an unfinished one."""
    return file_exists(Path(path) / STORE_FILE)


def convert(
    source: str | os.PathLike,
    out: str | os.PathLike,
    *,
    dtype: Any = None,
    weight_format: WeightFormat = "dequantized",
    use_tqdm: bool | None = None,
) -> int:
    """Makes a store of a Hugging Face checkpoint, layer by layer: never is more than one of them in memory.

    The work is done in `OUT.partial`, which is renamed at the very end. Where an earlier run of the same source and
    options left one, what it finished is kept.

    Args:
        source: folder of the checkpoint, or a model's name on the hub (`resolve`).
        out: folder to make.
        dtype: as for `load`.
        weight_format: as for `load`.
        use_tqdm: show a progress bar; by default, where standard error is a terminal.

    Returns:
        Bytes of all arrays of the store.

    Raises:
        CheckpointError: `out` is there already; its `.partial` is of something else; or as for `load`.
        ValueError: `dtype` or `weight_format` is none of those that `load` takes.
    """
    source, out = resolve(source), Path(out)
    if is_store(source):
        raise CheckpointError(f"{source}: got a store, expected a Hugging Face checkpoint: convert the one it is of")
    if os.path.lexists(out):
        raise CheckpointError(f"{out}: exists already: remove it, or convert to another folder")
    opened = open_checkpoint(source, dtype, weight_format=weight_format)
    manifest, partial = _describe(opened, weight_format), out.with_name(f"{out.name}.partial")
    _begin(partial, opened.folder, manifest)
    parts = _parts(opened.specs)
    with _progress("Converting", manifest, parts, use_tqdm) as bar:
        for name, members in parts.items():
            if not _part_folder(partial, name).exists():
                _save_part(_part_folder(partial, name), opened, manifest, members)
            bar.update(manifest.nbytes(members))
    files = {str(file.relative_to(partial)): file.stat().st_size for file in _files(partial)}
    _write_manifest(partial, dataclasses.replace(manifest, complete=True, files=files))
    partial.rename(out)
    return sum(map(manifest.nbytes, parts.values()))


def restore(
    path: str | os.PathLike,
    dtype: Any = None,
    *,
    widen: bool = True,
    weight_format: WeightFormat | None = None,
    sharding: Callable[[Weight], Sharding] | None = None,
    use_tqdm: bool | None = None,
) -> tuple[ModelConfig, Params]:
    """Loads a store, each device reading what it holds. Takes the memory of the parameters and of one layer more.

    See `jaxspec.checkpoint.load`, of whose arguments two mean less here: `dtype` casts no weight that is in FP8, and
    `weight_format` is what the store has to have been made with, None taking any.
    """
    folder, target = Path(path), None if dtype is None else weight_dtype(dtype)
    manifest, config, specs = _open(folder)
    if weight_format not in (None, manifest.weight_format):
        raise CheckpointError(
            f"{folder}: got a store made with weight_format {manifest.weight_format!r}, expected {weight_format!r}: "
            f"leave weight_format out, or {_AGAIN}"
        )
    parts = _parts(specs)
    placed: dict[str, Array] = {}
    with _progress("Restoring", manifest, parts, use_tqdm) as bar:
        for name, members in parts.items():
            plans = _plans(manifest, members, target, widen, sharding)
            part = _load_part(_part_folder(folder, name), manifest, members, plans)
            placed |= _place(part, members[0], plans, placed)
            bar.update(manifest.nbytes(members))

    def assemble(path: tuple, weight: Weight) -> Array | BlockScaled:
        arrays = [placed[name] for name in manifest.arrays(_Member(_path(path), weight, None))]
        return arrays[0] if len(arrays) == 1 else BlockScaled(*arrays, tuple(manifest.block))

    return config, jax.tree_util.tree_map_with_path(assemble, specs)


def stored_arrays(path: str | os.PathLike) -> tuple[dict[str, jax.ShapeDtypeStruct], int]:
    """What a store holds, from `jaxspec.json` alone, and in how many files.

    Returns:
        Every array, layers stacked, by its path among the parameters and the name of its tensors on the hub, parted
        by a space; codes of FP8 as float8_e4m3fn. Then the number of files.

    Raises:
        CheckpointError: as for `restore`.
    """
    manifest, _, specs = _open(Path(path))
    found = {}
    for path, weight in jax.tree.leaves_with_path(specs):
        for name, array in manifest.arrays(_Member(_path(path), weight, None)).items():
            dtype = FP8 if array.dtype == np.uint8 else array.dtype
            found[f"{name} {weight.hf_name}"] = jax.ShapeDtypeStruct(array.shape, dtype)
    return found, len(manifest.files)


class _Plan(NamedTuple):
    """What becomes of an array: the dtype that it gets, and where all of it goes."""

    dtype: np.dtype
    sharding: Sharding


def _plans(
    manifest: _Manifest,
    members: list[_Member],
    target: np.dtype | None,
    widen: bool,
    sharding: Callable[[Weight], Sharding] | None,
) -> dict[str, _Plan]:
    plans = {}
    # Orbax has to be told: it would put arrays where they were when they were saved, and warn.
    default = jnp.zeros(()).sharding
    for member in members:
        weight, chosen = member.weight, default if sharding is None else sharding(member.weight)
        arrays = manifest.arrays(member)
        for (name, array), whole in zip(
            arrays.items(), (chosen, of_axes(chosen, 0, len(weight.stack))), strict=False
        ):
            cast = target is not None and weight.dtype is None and len(arrays) == 1
            cast = cast and (widen or array.dtype.itemsize >= target.itemsize)
            plans[name] = _Plan(target if cast else array.dtype, whole)
    return plans


def _load_part(file: Path, manifest: _Manifest, members: list[_Member], plans: dict[str, _Plan]) -> dict[str, Array]:
    """The arrays of a part as they are stored, each where it will be in the whole."""
    wanted = {}
    for member in members:
        for name, array in manifest.arrays(member).items():
            sharding = plans[name].sharding if member.layer is None else of_axes(plans[name].sharding, 1, None)
            wanted[name] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    try:
        return ocp.load(file, wanted)
    except Exception as error:  # Each layer of Orbax has its own for a file that is missing or damaged.
        raise CheckpointError(f"{file}: {' '.join(str(error).split()):.300}: {_AGAIN}") from error


def _place(
    part: dict[str, Array], member: _Member, plans: dict[str, _Plan], placed: dict[str, Array]
) -> dict[str, Array]:
    """The arrays with a part put in, in the memory they have. `member` is any of the part's."""
    dtypes, shardings = ({name: plan[i] for name, plan in plans.items()} for i in (0, 1))
    if member.layer is None:
        return {name: jax.device_put(array.astype(dtypes[name]), shardings[name]) for name, array in part.items()}
    if member.layer == 0:
        shapes = {name: (member.weight.shape[0], *array.shape) for name, array in part.items()}
        wholes = jax.jit(lambda: {n: jnp.zeros(shapes[n], dtypes[n]) for n in part}, out_shardings=shardings)()
    else:
        wholes = {name: placed[name] for name in part}
    return jax.jit(_put, donate_argnums=0, out_shardings=shardings)(wholes, part, member.layer)


def _put(wholes: dict[str, Array], part: dict[str, Array], layer: Array) -> dict[str, Array]:
    return {
        name: jax.lax.dynamic_update_index_in_dim(whole, part[name].astype(whole.dtype), layer, 0)
        for name, whole in wholes.items()
    }


def _describe(opened: Opened, weight_format: str) -> _Manifest:
    block = read_block_size(read_json_object(opened.folder / "config.json"))
    return _Manifest(
        format_version=FORMAT_VERSION,
        complete=False,
        source={"folder": opened.folder.resolve().name, "digest": _digest(opened.folder)},
        versions={name: importlib.metadata.version(name) for name in ("jaxspec", "jax", "orbax-checkpoint")},
        config_digest=_sha256(opened.folder / "config.json"),
        weight_format=weight_format,
        # Rows and columns as stored are the axes (out, in).
        block=[block[1], block[0]] if weight_format == "fp8" else None,
        own_mtp_embed=opened.own_mtp_embed,
        own_mtp_head=opened.own_mtp_head,
        dtypes={_path(p): opened.target(weight)[0].name for p, weight in jax.tree.leaves_with_path(opened.specs)},
        files={},
    )


def _digest(folder: Path) -> str:
    """Of config.json, and of what the headers say: every tensor's name, dtype, shape and place."""
    headers = hashlib.sha256(_sha256(folder / "config.json").encode())
    for name, tensor in sorted(read_tensors(folder).items()):
        headers.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.file.name} {tensor.offset}\n".encode())
    return headers.hexdigest()


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _path(path: tuple) -> str:
    """Of a weight among the parameters: moe.attn.q_b, say."""
    return ".".join(key.name for key in path)


def _parts(specs: Params) -> dict[str, list[_Member]]:
    """What each part holds. Weights of a stack of layers have it as their first axis."""
    parts: dict[str, list[_Member]] = {}
    for path, weight in jax.tree.leaves_with_path(specs):
        for layer in range(weight.shape[0]) if weight.stack else (None,):
            name = "top" if layer is None else f"{path[0].name}-{layer:05d}"
            parts.setdefault(name, []).append(_Member(_path(path), weight, layer))
    return parts


def _part_folder(folder: Path, name: str) -> Path:
    return folder / "parts" / name


def _begin(partial: Path, source: Path, manifest: _Manifest) -> None:
    """Makes the folder to work in, or checks and clears up the one that is there."""
    expected = dataclasses.asdict(manifest)
    if is_store(partial):
        found = read_json_object(partial / STORE_FILE)
        for key in expected.keys() - {"complete", "files"}:
            if found.get(key) != expected[key]:
                raise CheckpointError(
                    f"{partial}: left by a conversion with {key} {found.get(key)!r:.200}, expected "
                    f"{expected[key]!r:.200}: repeat that conversion to finish it, or remove the folder"
                )
    elif partial.exists() and any(partial.iterdir()):
        raise CheckpointError(
            f"{partial}: got files but no {STORE_FILE}: remove the folder, which is needed to work in"
        )
    else:
        partial.mkdir(parents=True, exist_ok=True)
        _write_manifest(partial, manifest)
    for pattern in DESCRIPTION:
        for file in source.glob(pattern):
            if file_exists(file):
                shutil.copyfile(file, partial / file.name)
    # What Orbax was at when it was interrupted has another name until it is whole.
    for stray in (partial / "parts").glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(stray)


def _save_part(folder: Path, opened: Opened, manifest: _Manifest, members: list[_Member]) -> None:
    arrays: dict[str, np.ndarray] = {}
    for member in members:
        read = opened.read(member.weight, member.layer)
        arrays |= zip(manifest.arrays(member), jax.tree.leaves(read), strict=True)
    context = ocp.Context()
    # Weights hardly compress, and trying takes longer than writing them.
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # Nobody changes the arrays meanwhile.
    context.memory.deepcopy_host_arrays = False
    with context:
        ocp.save(folder, arrays)


def _write_manifest(folder: Path, manifest: _Manifest) -> None:
    written = folder / f"{STORE_FILE}.new"
    written.write_text(json.dumps(dataclasses.asdict(manifest), indent=2) + "\n")
    written.replace(folder / STORE_FILE)


def _open(folder: Path) -> tuple[_Manifest, ModelConfig, Params]:
    """Checks what can be told before the first array is allocated: Orbax would fail midway, and less clearly."""
    manifest, config = _read_manifest(folder), read_config(folder)
    if _sha256(folder / "config.json") != manifest.config_digest:
        raise CheckpointError(f"{folder / 'config.json'}: differs from the one that was converted: {_AGAIN}")
    specs = param_specs(config, own_mtp_embed=manifest.own_mtp_embed, own_mtp_head=manifest.own_mtp_head)
    weights = {_path(path) for path, _ in jax.tree.leaves_with_path(specs)}
    # Every layer has files of its own, which also bounds what a hostile config.json can make of the parts.
    if manifest.dtypes.keys() != weights or config.num_layers + config.num_mtp_layers > len(manifest.files):
        raise CheckpointError(
            f"{folder / STORE_FILE}: got weights or files of another model than config.json: {_AGAIN}"
        )
    for name, size in manifest.files.items():
        file = folder / name
        got = file.stat().st_size if file_exists(file) else "none"
        if got != size:
            raise CheckpointError(f"{file}: got {got} bytes, expected {size}: copy the whole store, or {_AGAIN}")
    return manifest, config, specs


def _read_manifest(folder: Path) -> _Manifest:
    file = folder / STORE_FILE
    found = read_json_object(file)
    version = found.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{file}: got format_version {version!r:.80}, expected {FORMAT_VERSION}: {_AGAIN}")
    wrong = sorted(_KINDS.keys() ^ found.keys()) or [key for key in _KINDS if not isinstance(found[key], _KINDS[key])]
    if wrong:
        raise CheckpointError(f"{file}: {wrong[0]}: got {found.get(wrong[0])!r:.80}, expected {_KINDS}: {_AGAIN}")
    manifest = _Manifest(**found)
    if not manifest.complete:
        raise CheckpointError(
            f"{folder}: an unfinished conversion: repeat it to finish (jaxspec convert), or remove the folder"
        )
    unknown = [dtype for dtype in manifest.dtypes.values() if dtype not in _DTYPES]
    sizes = manifest.block if FP8.name in manifest.dtypes.values() else [1, 1]
    if unknown or sizes is None or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise CheckpointError(f"{file}: got dtypes {unknown} and block {sizes}, expected {_DTYPES} and two: {_AGAIN}")
    return manifest


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in (folder / "parts").rglob("*") if file.is_file())


def _progress(what: str, manifest: _Manifest, parts: dict[str, list[_Member]], use_tqdm: bool | None) -> tqdm:
    total = sum(map(manifest.nbytes, parts.values()))
    hidden = None if use_tqdm is None else not use_tqdm
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=hidden)
