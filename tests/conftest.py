"""Strict settings for every test: CPU only, shapes checked, rank promotion an error."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

from jaxtyping import install_import_hook

install_import_hook(["jaxspec", "pallas_kernels"], "typecheck.checked")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def key():
    """A fixed random key."""
    return jax.random.key(0)
