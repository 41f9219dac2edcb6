"""Reads a Hugging Face folder into parameters, the inverse of the writer.

Strict both ways: every declared weight is found with its shape, and every stored tensor is used. Everything is
checked before the first array is allocated, and each array is then filled straight from the mapped files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.checkpoint.files import CheckpointError, read_json_object
from jaxspec.checkpoint.shards import DTYPES, StoredTensor, read_tensors
from jaxspec.config import ModelConfig
from jaxspec.models.params import Params, Weight, param_specs

Stored = dict[str, StoredTensor]


def load(path: str | Path, dtype: Any = None, *, widen: bool = True) -> tuple[ModelConfig, Params]:
    """Loads a model from a folder of `config.json` and safetensors, on the default device.

    MTP modules are found by depth, at the layers that follow the trunk's. Their copies of the trunk's embedding and
    head may be left out of the file; where all of them are stored and repeat the trunk's, they are dropped.

    Args:
        path: local folder.
        dtype: bfloat16, float16 or float32, to cast the weights to while they are copied; None keeps them as
            stored. Weights with a dtype of their own (the router's) have that one either way.
        widen: False leaves weights as they are that are stored narrower than `dtype`; used with activations of that
            dtype they give the same results, at half the memory.

    Returns:
        The architecture and its parameters.

    Raises:
        CheckpointError: a ValueError that names the file, what it holds, what was expected and what to do. The path
            is no checkpoint; config.json is refused; a shard is missing or damaged; index, shards and config
            disagree; or the weights have several dtypes and `dtype` is None.
        ValueError: `dtype` is none of the three.
    """
    target = None if dtype is None else _weight_dtype(dtype)
    folder = Path(path)
    config = read_config(folder)
    stored = read_tensors(folder)
    specs, stored = _without_copies(folder, config, stored)
    _check_names(folder, config, specs, stored)
    for weight in jax.tree.leaves(specs):
        _check_shapes(weight, stored)
    if target is None:
        target = _common_dtype(folder, specs, stored)

    def read(weight: Weight) -> Array:
        kept = target if widen or weight.dtype else _narrower(target, weight, stored)
        return jnp.asarray(_fill(weight, stored, weight.dtype or kept))

    return config, jax.tree.map(read, specs)


def read_config(folder: Path) -> ModelConfig:
    """The architecture in `config.json`, with the end-of-sequence ids of `generation_config.json` where it has any.

    Raises:
        CheckpointError: the folder or the file is missing, or its content is refused.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder: expected a local one with config.json and safetensors; a model of the hub "
            "has to be downloaded first"
        )
    file, generation = folder / "config.json", folder / "generation_config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder}: no config.json: expected the folder of a Hugging Face checkpoint")
    try:
        return ModelConfig.from_hf(
            read_json_object(file), read_json_object(generation) if generation.is_file() else None
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _weight_dtype(dtype: Any) -> np.dtype:
    try:
        target = jnp.dtype(dtype)
    except TypeError:
        target = dtype
    if target not in DTYPES.values():
        raise ValueError(f"dtype: got {dtype!r}, expected one of {', '.join(map(str, DTYPES.values()))}")
    return target


def _without_copies(folder: Path, config: ModelConfig, stored: Stored) -> tuple[Params, Stored]:
    """The declarations that fit what is stored, and the stored tensors less those that only repeat the trunk's."""
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    every, stored = param_specs(untied, own_mtp_embed=True, own_mtp_head=True), dict(stored)
    embed, head = every.embed.hf_name, every.head.hf_name
    if config.tie_word_embeddings:
        _drop_tied_head(stored, head, embed)
        head = embed
    if every.mtp is None:
        return param_specs(config), stored
    own_embed = _keep_own_copies(folder, stored, every.mtp.embed, embed)
    own_head = _keep_own_copies(folder, stored, every.mtp.head, head)
    return param_specs(config, own_mtp_embed=own_embed, own_mtp_head=own_head), stored


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
    """Whether two tensors hold the same values, compared by blocks: neither is ever whole in memory."""
    if other is None or one.array.shape != other.array.shape:
        return False
    left, right, block = one.array.reshape(-1), other.array.reshape(-1), 1 << 20
    return all(
        np.array_equal(left[i : i + block].astype(np.float32), right[i : i + block].astype(np.float32))
        for i in range(0, left.size, block)
    )


def _check_names(folder: Path, config: ModelConfig, specs: Params, stored: Stored) -> None:
    """What is declared and what is stored must be the same set of tensors."""
    expected = _names(jax.tree.leaves(specs))
    if specs.mtp is not None and not _names(jax.tree.leaves(specs.mtp)) & stored.keys():
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
        got = stored[name].array.shape
        if got != weight.hf_shape:
            raise CheckpointError(
                f"{stored[name].file}: {name}: got shape {got}, expected {weight.hf_shape}: "
                "fetch config.json and weights of one revision"
            )


def _common_dtype(folder: Path, specs: Params, stored: Stored) -> np.dtype:
    """The one dtype of all weights that have none of their own."""
    names = sorted(_names(weight for weight in jax.tree.leaves(specs) if weight.dtype is None))
    examples = {stored[name].array.dtype: name for name in names}
    if len(examples) > 1:
        kinds = ", ".join(f"{name} in {dtype}" for dtype, name in examples.items())
        raise CheckpointError(f"{folder}: got {kinds}, expected one dtype: pass dtype to load the weights as one")
    return next(iter(examples))


def _narrower(target: np.dtype, weight: Weight, stored: Stored) -> np.dtype:
    """`target`, or the dtype that all the weight's tensors are stored in if that is narrower."""
    dtypes = {stored[name].array.dtype for _, name in weight.tensors()}
    kept = dtypes.pop()
    return kept if not dtypes and kept.itemsize < target.itemsize else target


def _fill(weight: Weight, stored: Stored, dtype: Any) -> np.ndarray:
    """The array of a weight, cast while it is copied out of the mapped file."""
    array = np.empty(weight.shape, dtype)
    for index, name in weight.tensors():
        array[index] = weight.view(stored[name].array)
    return array


def _names(weights: Iterable[Weight]) -> set[str]:
    return {name for weight in weights for _, name in weight.tensors()}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
