"""Strict settings for every test: CPU only, shapes checked, rank promotion an error."""

import gc
import os

os.environ["JAX_PLATFORMS"] = "cpu"
# The suite compiles many programs and runs each for moments: LLVM need not try hard.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
# Warpgroups of an interpreted kernel wait for each other in threads of XLA's pool: on two cores it may run dry.
os.environ["NPROC"] = "8"
os.environ["HF_HUB_OFFLINE"] = "1"

from jaxtyping import install_import_hook

install_import_hook(["jaxspec", "pallas_kernels"], "typecheck.checked")

import harness
import jax
import jaxtyping
import pytest
from fixtures import SOFT_NOISE, YARN, write_cyc, write_rnd
from jax._src.pallas.mosaic.interpret import race_detection_state
from jax._src.pallas.mosaic_gpu.interpret import race_detection_state as gpu_race_detection_state

from jaxspec.checkpoint import load
from jaxspec.decoding import round as round_module
from pallas_kernels import compat

jax.config.update("jax_numpy_rank_promotion", "raise")


def raise_race(message: str) -> None:
    """A race fails the kernel in which it is found, as jax has it from 0.12 on."""
    raise RuntimeError(message)


# The interpreter of 0.11.2 prints races, and nothing else; it goes on, and the test would pass.
race_detection_state.print = gpu_race_detection_state.print = raise_race


@pytest.fixture(scope="session")
def key():
    """A fixed random key."""
    return jax.random.key(0)


@pytest.fixture(scope="module", autouse=True)
def free_programs():
    """Frees the programs a module compiled: each holds hundreds of memory maps, and Linux grants 65,530 a process."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def fresh(monkeypatch):
    """The harness's programs traced anew, so that a mutant is compiled in; its like is never found in a cache."""
    rounds = jax.jit(lambda *a: round_module.decode_round(*a), static_argnums=(1, 2, 4))
    monkeypatch.setattr(harness, "ROUND", rounds)
    monkeypatch.setattr(harness, "PREFILL", jax.jit(lambda *a: round_module.prefill(*a), static_argnums=(1, 2)))
    return monkeypatch


@pytest.fixture
def fresh_interpreter():
    """Clears what an interpreted kernel that failed leaves behind."""
    yield
    compat.reset_interpreter()
    jax.clear_caches()


@pytest.fixture
def unchecked_annotations():
    """Annotations as users have them, unchecked: bad shapes reach the library's own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """The field log's checkpoints, loaded: (ModelConfig, Params) by name, and their folders."""
    root = tmp_path_factory.mktemp("checkpoints")
    folders = {f"soft-{drafts}": write_cyc(root / drafts, drafts, SOFT_NOISE) for drafts in ("hit", "miss", "mix")}
    folders["rnd"] = write_rnd(root / "rnd")
    folders["rnd-yarn"] = write_rnd(root / "rnd-yarn", rope_scaling=YARN)
    for modules in (2, 3):
        folders[f"rnd-{modules}"] = write_rnd(root / f"rnd-{modules}", num_nextn_predict_layers=modules)
    return {name: (folder, *load(folder)) for name, folder in folders.items()}
