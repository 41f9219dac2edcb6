"""What a checkpoint is, from config.json and the headers of its shards, or a store's: no weight is read.

Made for checkpoints that cannot be run as well: what stands in the way is said in sentences, and the rest reported.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxspec.checkpoint.files import CheckpointError, file_exists, parse_json_object, read_json_object
from jaxspec.checkpoint.hub import resolve
from jaxspec.checkpoint.quantization import FP8, SCALE_SUFFIX, read_block_size, split_scales
from jaxspec.checkpoint.reader import read_config
from jaxspec.checkpoint.shards import DTYPES, INDEX_FILE, MAX_HEADER_BYTES, StoredTensor, read_tensors
from jaxspec.checkpoint.store import is_store, stored_arrays
from jaxspec.checkpoint.tokenizer import read_chat_template
from jaxspec.config import ModelConfig
from jaxspec.models.params import Weight, count_params, param_specs

_BF16_BYTES = 2
_MTP = "MTP modules"
# The number of a tensor's layer, or that it is an MTP module's by name.
_LAYER = re.compile(r"\bmtp\.|\blayers\.(\d+)\.")
# The part of the trunk that a tensor belongs to: the first whose pattern is found in its name.
_PARTS = {
    part: re.compile(pattern)
    for part, pattern in {
        "routed experts": r"\.experts\.",
        "norms": r"norm",
        "shared experts": r"\.shared_experts?\.",
        "router": r"\.(gate|router)\.",
        "attention": r"attn|attention",
        "dense MLP": r"\.(mlps?|ffn)\.",
        "embedding": r"embed",
        "head": r"lm_head|\bhead\.",
    }.items()
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Buffers that old releases store, and that follow from config.json.
_BUFFERS = r".*\.rotary_emb\.inv_freq"
# Beyond this many times what is stored, what config.json promises is not looked up tensor by tensor.
_MOST_PROMISED = 4
_UNITS = ("", " k", " M", " G", " T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info:
    """A checkpoint at a glance; `str()` of it is a table. What takes a config.json that is accepted is None without.

    Attributes:
        path: its folder.
        model_type: as config.json gives it.
        architecture: likewise.
        num_parameters: of the trunk: all but the MTP modules'.
        num_active_parameters: those of the trunk that one token passes through: of the routed experts as many as are
            chosen, of the embedding the one row looked up, unless it is the head too. DeepSeek-V3's published 37 B of
            671 B is this count, which leaves the rest of the embedding out.
        num_mtp_parameters: of the MTP modules, without copies of the trunk's embedding and head.
        num_mtp_modules: MTP modules that config.json promises.
        context_limit: most tokens of a request.
        kv_bytes_per_token: of the trunk's latents and rotary keys, cached in bfloat16.
        mtp_kv_bytes_per_token: likewise of the MTP modules'.
        quantization: format of quantised weights in words; None where config.json names none.
        num_files: shards, or files of a store, that are there.
        num_tensors: tensors in them; a store's have all layers in one.
        num_bytes: bytes of these tensors.
        bytes_by_part: the same by part of the model, MTP modules whole, copies of embedding and head included.
        bytes_by_dtype: the same by stored dtype, by the names of the safetensors format.
        has_tokenizer: there is a tokenizer.json.
        has_chat_template: there is a chat template.
        refused: sentences that say why the checkpoint cannot be loaded; none if it can.
        limited: sentences that say what will not work with it.
    """

    path: str
    model_type: str | None
    architecture: str | None
    num_parameters: int | None = None
    num_active_parameters: int | None = None
    num_mtp_parameters: int | None = None
    num_mtp_modules: int | None = None
    context_limit: int | None = None
    kv_bytes_per_token: int | None = None
    mtp_kv_bytes_per_token: int | None = None
    quantization: str | None
    num_files: int
    num_tensors: int
    num_bytes: int
    bytes_by_part: dict[str, int]
    bytes_by_dtype: dict[str, int]
    has_tokenizer: bool
    has_chat_template: bool
    refused: tuple[str, ...]
    limited: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether nothing stands in the way of loading the checkpoint."""
        return not self.refused

    def to_dict(self) -> dict[str, Any]:
        """Every attribute, and `usable`, for JSON."""
        return dataclasses.asdict(self) | {"usable": self.usable}

    def __str__(self) -> str:
        rows = [("model", f"{self.model_type} ({self.architecture})"), *self._model_rows(), *self._stored_rows()]
        rows += [("refused", sentence) for sentence in self.refused]
        rows += [("limited", sentence) for sentence in self.limited]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:{width}}  {text}" for label, text in rows)

    def _model_rows(self) -> list[tuple[str, str]]:
        if self.num_parameters is None:
            return []
        return [
            ("parameters", f"{_short(self.num_parameters)}, {_short(self.num_active_parameters)} active per token"),
            ("MTP modules", f"{self.num_mtp_modules} with {_short(self.num_mtp_parameters)} parameters"),
            ("context limit", f"{self.context_limit:,} tokens"),
            (
                "KV cache",
                f"{self.kv_bytes_per_token:,} bytes a token in bfloat16, {self.mtp_kv_bytes_per_token:,} for MTP",
            ),
        ]

    def _stored_rows(self) -> list[tuple[str, str]]:
        template = "with" if self.has_chat_template else "without"
        return [
            ("quantisation", self.quantization or "none"),
            ("tokenizer", f"{'yes' if self.has_tokenizer else 'no'}, {template} chat template"),
            ("stored", f"{_short(self.num_bytes)}B in {self.num_files} files, {self.num_tensors:,} tensors"),
            *((f"  {part}", f"{_short(size)}B") for part, size in self.bytes_by_part.items()),
            *((f"  in {dtype}", f"{_short(size)}B") for dtype, size in self.bytes_by_dtype.items()),
            ("usable", "yes" if self.usable else "no"),
        ]


class _Header(NamedTuple):
    """A tensor as a header has it, whatever dtype that names."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


Tensors = Mapping[str, StoredTensor | _Header]


def checkpoint_info(path: str | os.PathLike) -> Info:
    """Describes the checkpoint in a folder without reading a weight.

    Args:
        path: local folder, or the name of a model on the hub (`resolve`) that is in its cache: none is fetched.

    Raises:
        CheckpointError: there is no such folder, or nothing in it that can be read.
    """
    folder, refused = resolve(path, fetch=False), []
    raw = _attempt([], read_json_object, folder / "config.json") or {}
    config = _attempt(refused, read_config, folder)
    tensors, num_files = (_read_store if is_store(folder) else _read_shards)(folder, refused)
    if not raw and not num_files:
        raise CheckpointError(
            f"{folder}: got neither config.json nor safetensors, expected the folder of a checkpoint: {refused[0]}"
        )
    if config is not None and not refused and not is_store(folder):
        _attempt(refused, lambda _: split_scales(folder, tensors, read_block_size(raw)), folder)
        refused += _disagreements(folder, config, tensors)
    limited = _limits(folder, config)
    if config is not None and not refused and not is_store(folder):
        limited += _mixed_dtypes(config, tensors)
    by_part, by_dtype = _sizes(tensors, raw.get("num_hidden_layers"))
    return Info(
        path=str(folder),
        model_type=raw.get("model_type"),
        architecture=", ".join(map(str, raw.get("architectures") or ())) or None,
        **({} if config is None else _counts(config)),
        quantization=_quantization(raw),
        num_files=num_files,
        num_tensors=len(tensors),
        num_bytes=sum(by_dtype.values()),
        bytes_by_part=by_part,
        bytes_by_dtype=by_dtype,
        has_tokenizer=(folder / "tokenizer.json").is_file(),
        has_chat_template=_attempt(limited, read_chat_template, folder) is not None,
        refused=tuple(refused),
        limited=tuple(limited),
    )


def _attempt(faults: list[str], function: Callable[[Path], Any], path: Path) -> Any:
    """What the function gives, or None where it raises, which is then noted."""
    try:
        return function(path)
    except (CheckpointError, OSError) as error:
        faults.append(str(error))
        return None


def _shard_files(folder: Path) -> list[Path]:
    """The files that the index names, there or not; without a usable index, those there are."""
    weight_map = (_attempt([], read_json_object, folder / INDEX_FILE) or {}).get("weight_map")
    if isinstance(weight_map, dict) and weight_map:
        # By name alone: an index must not reach out of its folder.
        return [folder / Path(name).name for name in sorted(set(map(str, weight_map.values())))]
    return sorted(folder.glob("*.safetensors"))


def _read_store(folder: Path, refused: list[str]) -> tuple[Tensors, int]:
    arrays, num_files = _attempt(refused, stored_arrays, folder) or ({}, 0)
    return {
        name: _Header(_DTYPE_NAMES[array.dtype], array.shape, array.size * array.dtype.itemsize)
        for name, array in arrays.items()
    }, num_files


def _read_shards(folder: Path, refused: list[str]) -> tuple[Tensors, int]:
    """All tensors as the reader finds them, and the number of shards that are there.

    Where the reader refuses, the reason is noted, and headers are taken unchecked.
    """
    files = _shard_files(folder)
    present = [file for file in files if _attempt(refused, file_exists, file)]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        refused.append(f"{folder}: {len(absent)} of {len(files)} shards are missing: {_listed(absent)}: fetch them")
    elif (stored := _attempt(refused, read_tensors, folder)) is not None:
        return stored, len(present)
    headers = [_attempt([], _unchecked, file) or {} for file in present]
    return {name: header for found in headers for name, header in found.items()}, len(present)


def _unchecked(file: Path) -> dict[str, _Header]:
    """What a header says of its tensors, of dtypes that cannot be read too."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = parse_json_object(opened.read(min(length, MAX_HEADER_BYTES)), f"{file}: header")
    found = {}
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
                found[name] = _Header(dtype, tuple(shape), end - begin)
    return found


def _disagreements(folder: Path, config: ModelConfig, tensors: Tensors) -> list[str]:
    """Where the tensors are not those of the model in config.json, as far as headers tell."""
    specs = param_specs(config)
    promised = sum(math.prod(len(ids) for _, ids in weight.stack) for weight in jax.tree.leaves(specs))
    if promised > _MOST_PROMISED * len(tensors):
        return [f"{folder}: {len(tensors)} tensors are stored, but config.json promises {promised}"]
    required, mtp = _by_name(specs), _by_name(specs.mtp)
    if mtp and mtp.keys().isdisjoint(tensors):
        modules = config.num_mtp_layers
        return [f"{folder}: config.json promises {modules} MTP modules, none is stored: set their number to 0 in it"]
    # Whether copies of embedding and head repeat the trunk's, only their weights could tell.
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    known = _by_name(param_specs(untied, own_mtp_embed=True, own_mtp_head=True))
    unused = tensors.keys() - known.keys() - {f"{name}{SCALE_SUFFIX}" for name in known}
    ignored = re.compile(f"{_BUFFERS}|{config.ignored_tensors}" if config.ignored_tensors else _BUFFERS)
    found = {
        "not stored": required.keys() - tensors.keys(),
        "stored, but no part of the model in config.json": {name for name in unused if not ignored.fullmatch(name)},
        "of another shape than config.json says": {
            name for name, weight in known.items() if name in tensors and tensors[name].shape != weight.hf_shape
        },
    }
    return [f"{folder}: {how}: {_listed(sorted(names))}" for how, names in found.items() if names]


def _mixed_dtypes(config: ModelConfig, tensors: Tensors) -> list[str]:
    dtypes = {tensors[name].dtype for name, weight in _by_name(param_specs(config)).items() if weight.dtype is None}
    names = sorted(_DTYPE_NAMES[dtype] for dtype in dtypes - {FP8})
    return [f"weights are stored in {' and '.join(names)}: one has to be chosen as dtype"] if len(names) > 1 else []


def _limits(folder: Path, config: ModelConfig | None) -> list[str]:
    limits = []
    if not (folder / "tokenizer.json").is_file():
        limits.append("there is no tokenizer.json: prompts have to be token ids, and outputs have no text")
    if config is None:
        return limits
    if config.index_topk is not None and config.max_position_embeddings > config.index_topk:
        limits.append(
            f"sparse attention is not implemented: of {config.max_position_embeddings} tokens of context, the "
            f"{config.index_topk} within which it equals dense attention can be used"
        )
    return limits


def _sizes(tensors: Tensors, depth: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by part and by dtype, the largest first. `depth` is the trunk's, which a refused config may give too."""
    first_mtp_layer, by_part, by_dtype = depth if isinstance(depth, int) else math.inf, Counter(), Counter()
    for name, tensor in tensors.items():
        by_part[_part_of(name, first_mtp_layer)] += tensor.nbytes
        by_dtype[_DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))] += tensor.nbytes
    return dict(by_part.most_common()), dict(by_dtype.most_common())


def _part_of(name: str, first_mtp_layer: float) -> str:
    layer = _LAYER.search(name)
    if layer is not None and (layer[1] is None or int(layer[1]) >= first_mtp_layer):
        return _MTP
    return next((part for part, pattern in _PARTS.items() if pattern.search(name)), "other")


def _counts(config: ModelConfig) -> dict[str, int]:
    """What the architecture alone decides."""
    specs, entry = param_specs(config), (config.kv_lora_rank + config.qk_rope_head_dim) * _BF16_BYTES
    trunk = specs.replace(mtp=None)
    unread = 0 if config.tie_word_embeddings else (config.vocab_size - 1) * config.hidden_size
    return {
        "num_parameters": count_params(trunk),
        "num_active_parameters": sum(_active(config, weight) for weight in jax.tree.leaves(trunk)) - unread,
        "num_mtp_parameters": count_params(specs) - count_params(trunk),
        "num_mtp_modules": config.num_mtp_layers,
        "context_limit": min(config.max_position_embeddings, config.index_topk or config.max_position_embeddings),
        "kv_bytes_per_token": config.num_trunk_attentions * entry,
        "mtp_kv_bytes_per_token": config.num_mtp_layers * entry,
    }


def _active(config: ModelConfig, weight: Weight) -> int:
    size = math.prod(weight.shape)
    if "experts" not in weight.axes:
        return size
    return size * config.num_experts_per_tok // weight.shape[weight.axes.index("experts")]


def _quantization(raw: dict[str, Any]) -> str | None:
    given = raw.get("quantization_config")
    if not isinstance(given, dict):
        return None
    words = [str(given[key]) for key in ("quant_method", "fmt") if key in given]
    block = given.get("weight_block_size")
    return " ".join(words) + (f" in blocks of {' x '.join(map(str, block))}" if isinstance(block, list) else "")


def _by_name(specs: Any) -> dict[str, Weight]:
    return {name: weight for weight in jax.tree.leaves(specs) for _, name in weight.tensors()}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _short(number: int) -> str:
    """Three to six digits and a unit of thousands: 671.026 G."""
    power = min(max(len(str(number)) - 1, 0) // 3, len(_UNITS) - 1)
    return f"{number / 1000**power:.{3 if power else 0}f}{_UNITS[power] or ' '}"
