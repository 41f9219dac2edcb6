"""Where the CUDA plugin is installed but no NVIDIA driver, JAX must not look for a GPU: the plugin crashes."""

from __future__ import annotations

import ctypes
import importlib.util

import jax


def use_cpu_without_driver() -> None:
    """Chooses the CPU if the user chose nothing, a CUDA plugin is installed and the driver's library is missing.

    Installing the plugin without a GPU is no mistake: it compiles for one (the dev group has it for that).
    """
    if jax.config.jax_platforms or not _cuda_plugin_installed():
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        jax.config.update("jax_platforms", "cpu")


def _cuda_plugin_installed() -> bool:
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{major}") for major in (12, 13))
