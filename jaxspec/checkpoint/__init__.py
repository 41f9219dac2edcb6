"""Checkpoints: Hugging Face folders in and out, stores that restore onto any mesh, and their tokenizers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from jax.sharding import Sharding

from jaxspec.checkpoint import reader
from jaxspec.checkpoint.files import CheckpointError
from jaxspec.checkpoint.hub import resolve
from jaxspec.checkpoint.info import Info, checkpoint_info
from jaxspec.checkpoint.reader import WeightFormat, read_config
from jaxspec.checkpoint.store import convert, is_store, restore
from jaxspec.checkpoint.tokenizer import Tokenizer, load_tokenizer
from jaxspec.checkpoint.writer import save_hf
from jaxspec.config import ModelConfig
from jaxspec.models.params import Params, Weight

__all__ = [
    "CheckpointError",
    "Info",
    "Tokenizer",
    "checkpoint_info",
    "convert",
    "is_store",
    "load",
    "load_tokenizer",
    "read_config",
    "resolve",
    "restore",
    "save_hf",
]


def load(
    path: str | os.PathLike,
    dtype: Any = None,
    *,
    widen: bool = True,
    weight_format: WeightFormat | None = None,
    sharding: Callable[[Weight], Sharding] | None = None,
    use_tqdm: bool | None = None,
) -> tuple[ModelConfig, Params]:
    """Loads a model, from a Hugging Face folder or a store.

    MTP modules are found by depth, at the layers that follow the trunk's. Their copies of the trunk's embedding and
    head may be left out of the file; where all of them are stored and repeat the trunk's, they are dropped.

    Args:
        path: local folder, or a model's name on the hub (`resolve`).
        dtype: bfloat16, float16 or float32, to cast the weights to while they are copied; None keeps them as
            stored, and takes FP8 weights to the dtype of the others. Weights with a dtype of their own (the
            router's) have that one either way.
        widen: False leaves weights as they are that are stored narrower than `dtype`; used with activations of that
            dtype they give the same results, at half the memory.
        weight_format: what becomes of weights in FP8. "dequantized" multiplies them out; "fp8" keeps those that are
            plain matrices as `BlockScaled`, which dequantises tile by tile in use. None is "dequantized", or what a
            store was made with, which it has to be.
        sharding: where each array goes, from its declaration; by default all go to the default device. The scales
            of a `BlockScaled` follow its stacked axes alone.
        use_tqdm: show a progress bar; by default, where standard error is a terminal.

    Returns:
        The architecture and its parameters.

    Raises:
        CheckpointError: a ValueError that names the file, what it holds, what was expected and what to do: the
            checkpoint is missing, damaged, contradictory or of an architecture that is not supported.
        ValueError: `dtype` or `weight_format` is none of those named.
    """
    folder = resolve(path)
    if is_store(folder):
        read = restore
    else:
        read, weight_format = reader.load, weight_format or "dequantized"
    return read(folder, dtype, widen=widen, weight_format=weight_format, sharding=sharding, use_tqdm=use_tqdm)
