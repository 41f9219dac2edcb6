"""Writes parameters as a Hugging Face folder, the inverse of the reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxspec.config import ModelConfig
from jaxspec.models.params import Params, Weight, param_specs


def save_hf(path: str | Path, config: ModelConfig, params: Params, dtype: Any = ml_dtypes.bfloat16) -> None:
    """Writes `config.json` and `model.safetensors`, which transformers loads too.

    Args:
        path: folder, made when absent.
        config: the architecture.
        params: its parameters.
        dtype: stored dtype of every weight without a fixed one.

    Raises:
        ValueError: the parameters are not those of the architecture.
    """
    path, tensors = Path(path), to_hf_tensors(config, params, dtype)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config.to_hf(np.dtype(dtype).name), indent=2) + "\n")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def to_hf_tensors(config: ModelConfig, params: Params, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The parameters as stored tensors, by name.

    Raises:
        ValueError: the parameters are not those of the architecture.
    """
    own = params.mtp is not None
    specs = param_specs(
        config,
        own_mtp_embed=own and params.mtp.embed is not None,
        own_mtp_head=own and params.mtp.head is not None,
    )
    tensors: dict[str, np.ndarray] = {}

    def write(weight: Weight, array: Any) -> None:
        array = np.asarray(array)
        if array.shape != weight.shape:
            raise ValueError(f"{weight.hf_name}: got shape {array.shape}, expected {weight.shape}")
        for index, name in weight.tensors():
            stored = tensors.setdefault(name, np.empty(weight.hf_shape, weight.dtype or dtype))
            weight.view(stored)[...] = array[index].astype(stored.dtype)

    jax.tree.map(write, specs, params)
    return tensors
