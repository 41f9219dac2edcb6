"""The gate for GPU code in a world without GPUs: kernels compile for an H200, and their figures are the table's."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest
from h200 import FAULTY, PROGRAMS, ROUNDS, TABLE, compilers, figures, kernel_figures, pool_copies

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="jax's CUDA wheels exist for Linux alone")
COMMITTED = json.loads(TABLE.read_text())
WRITE = "if the change is meant, run `python tests/h200.py --write` and commit the table"
MOST_SPILLED = 512  # bytes of instructions, not of traffic: outside a loop they cost next to nothing
SHARED_BYTES = 227 * 1024  # what a block may have on an H200; 1 KiB of the 228 is the driver's


def test_the_table_is_of_these_programs():
    assert list(COMMITTED["programs"]) == list(PROGRAMS), WRITE


@pytest.mark.parametrize("name", PROGRAMS)
def test_figures_are_good_and_those_of_the_table(name):
    """Equal to the table's under its compilers; other ones may allot registers otherwise, but no worse than this."""
    found = figures(name)
    if COMMITTED["compilers"] == compilers():
        assert found == COMMITTED["programs"][name], WRITE
    assert found["pool_copies"] == 0
    assert found["kernels"]
    for kernel in (kernel for variants in found["kernels"].values() for kernel in variants):
        assert kernel["target"] == "sm_90a"
        assert kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"] <= SHARED_BYTES
        assert kernel["performance_warnings"] == 0
        assert kernel["spill_bytes"] <= MOST_SPILLED


@pytest.mark.parametrize("name", FAULTY)
def test_a_copied_pool_is_seen(name):
    assert figures(name)["pool_copies"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_copies_no_pool(name):
    """Its temporaries hold logits and one layer's experts, which XLA copies out of the stack."""
    program = figures(name)
    assert program["pool_copies"] == 0
    assert program["temporary_bytes"] < 1.5 * 2**30


def test_a_failure_brings_its_reason():
    with pytest.raises(RuntimeError, match=r"compiling .no such program. for an H200 failed:\n(.*\n)*KeyError"):
        figures("no such program")


def test_the_test_process_stays_on_the_cpu():
    assert jax.default_backend() == "cpu"


PTXAS = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient \
register resources for the wgmma pipeline in the function 'attend_mosaic_gpu_kernel'
ptxas warning : Registers are spilled to local memory in function 'f', 24 bytes spill stores, 20 bytes spill loads
ptxas info    : Compiling entry function 'attend_mosaic_gpu_kernel' for 'sm_90a'
ptxas         .     16 bytes stack frame, 24 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 17 bytes smem
"""
PTX = """\
.target sm_90a
	{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;}
	@%p3 cp.async.bulk.tensor.3d.shared::cluster.global.tile [%r1], [%rd3, {%r2}], [%r4];
	// wgmma.mma_async in a comment
	bar.sync 	1, 128;
"""


def test_reports_are_read():
    assert kernel_figures(PTXAS, PTX, "gpu.launch dynamic_shared_memory_size %c229376_i32 {") == {
        "target": "sm_90a",
        "registers": 168,
        "spill_bytes": 44,
        "static_shared_bytes": 17,
        "dynamic_shared_bytes": 229376,
        "wgmma": 1,
        "tma": 1,
        "barriers": 1,
        "performance_warnings": 1,
    }


def test_copies_are_counted_by_shape():
    pool = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    hlo = """
    %copy.1 = bf16[2,3]{1,0} copy(%p)
    %copy.2 = bf16[2,4]{1,0} copy(%q)
    %copy.3 = f32[2,3]{1,0} copy(%r)
    %copy-start.1 = (bf16[2,3]{1,0}, bf16[2,3]{1,0}, u32[]) copy-start(%p)
    %add = bf16[2,3]{1,0} add(%copy.1, %p)
    """
    assert pool_copies(hlo, (pool,)) == 2
