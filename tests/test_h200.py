"""The gate for GPU code in a world without GPUs: kernels compile for an H200, and their figures are the table's."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import pytest
from h200 import (
    ATTENTION,
    FAULTY,
    PROGRAMS,
    ROUNDS,
    TABLE,
    compilers,
    figures,
    kernel_figures,
    launch_figures,
    pool_copies,
    read_thunks,
)

from pallas_kernels.paged_mla.tuning import CONFIGS, PAGE_SIZES, tile_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="jax's CUDA wheels exist for Linux alone")
COMMITTED = json.loads(TABLE.read_text())
WRITE = "if the change is meant, run `python tests/h200.py --write` and commit the table"
MOST_SPILLED = 0  # bytes
SHARED_BYTES = 227 * 1024  # what a block may have on an H200; 1 KiB of the 228 is the driver's


def test_the_table_is_of_these_programs():
    assert list(COMMITTED["programs"]) == list(PROGRAMS), WRITE


def test_every_tile_that_ships_is_compiled():
    """In whole rows, too, where the table's last lines have any number of tiles."""
    compiled = {tile_config(c.tokens * c.heads, c.page_size, c.dtype) for c in ATTENTION.values()}
    assert compiled == set(CONFIGS)
    assert {c.page_size for c in ATTENTION.values()} == set(PAGE_SIZES)


@pytest.mark.parametrize("name", PROGRAMS)
def test_figures_are_good_and_those_of_the_table(name):
    """Equal to the table's under its compilers; other ones may allot registers otherwise, but no worse than this."""
    found = figures(name)
    if COMMITTED["compilers"] == compilers():
        assert found == COMMITTED["programs"][name], WRITE
    assert found["pool_copies"] == 0
    assert found["kernels"]
    for kernel in found["kernels"].get("paged_mla_few_rows", []):
        assert kernel["reduction_scratches"] == 2, "the warpgroups would overwrite each other's maxima"
    for kernel in (kernel for variants in found["kernels"].values() for kernel in variants):
        assert kernel["target"] == "sm_90a"
        assert kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"] <= SHARED_BYTES
        assert kernel["performance_warnings"] == 0
        assert kernel["spill_bytes"] <= MOST_SPILLED


@pytest.mark.parametrize("name", FAULTY)
def test_a_copied_pool_is_seen(name):
    assert figures(name)["pool_copies"] == 2


round_figures = functools.cache(figures)  # half a minute each
MOST_LAUNCHES = {  # of each loop over layers: trips, and launches of a trip; launches of a round; waits of the host
    "round of V2-Lite, 16 rows": ([[26, 49]], 1345, 4),
    "round of GLM-4.7-Flash, 16 rows, 3 drafts": ([[46, 52], [2, 63]], 2651, 10),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_copies_no_pool(name):
    """Its temporaries hold logits and one layer's experts, which XLA copies out of the stack.

    All that it does not overwrite in place is a few numbers for each row.
    """
    program = round_figures(name)
    assert program["pool_copies"] == 0
    assert program["temporary_bytes"] < 1.5 * 2**30
    assert program["memory"]["results"] < 1024


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_launches_no_more_than_it_did(name):
    """Of a layer, a fifth are copies of its weights out of the stacks; 3 are kernels of Pallas.

    XLA plans a layer as one command buffer, a CUDA graph, with the kernels of Pallas in it, for their custom call
    says that it may be recorded. A loop is in none: the host starts the layer's graph once a layer, with new
    addresses. A branch is in none if it has a loop inside, as the grant of pages and the sampling have: there the
    host waits for the GPU to know which way to go. What a graph costs to update and start, only a GPU tells.
    """
    found = round_figures(name)["launches"]
    layers, in_all, waits = MOST_LAUNCHES[name]
    more = f"launches more than it did; see what with XLA_FLAGS=--xla_dump_to=FOLDER: {found}"
    assert found["custom_calls_outside_graphs"] == 0
    assert [trips for trips, _ in found["layers"]] == [trips for trips, _ in layers]
    assert all(now <= before for (_, now), (_, before) in zip(found["layers"], layers, strict=True)), more
    assert found["least"] <= in_all, more
    assert found["host_waits"] <= waits
    assert found["outside_graphs"] <= 7


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


REDUCTIONS = [(1024, 2048), (1024, 2048), (3072, 2048), (5120, 0)]


def test_reports_are_read():
    reductions = (f"multi_reduction {{offset = {at} : i32, scratch_size = {size} : i32}}" for at, size in REDUCTIONS)
    launch = "gpu.launch dynamic_shared_memory_size %c229376_i32 {" + "".join(reductions)
    assert kernel_figures(PTXAS, PTX, launch) == {
        "target": "sm_90a",
        "registers": 168,
        "spill_bytes": 44,
        "static_shared_bytes": 17,
        "dynamic_shared_bytes": 229376,
        "reduction_scratches": 2,
        "wgmma": 1,
        "tma": 1,
        "barriers": 1,
        "performance_warnings": 1,
    }


THUNKS = """\
001: kCopy [] kCopy
013: kConditional []
  false_branch:
    004: kCustomKernel [] loop_broadcast_fusion_1
  true_branch:
    008: kWhile []
condition:
        009: kCustomKernel [] loop_compare_fusion
      body:
        010: kCustomKernel [] loop_add_fusion
        011: kCustomCall [] kCustomCall
047: kWhile []
condition:
    048: kCustomKernel [] loop_compare_fusion_1
  body:
    000: kCommandBuffer []
        049: kAsyncStart [] stream=computation_stream[0], async_id=49
            051: kDynamicSliceFusion [] params=1, results=1
                050: kCopy [] kCopy
        086: kAsyncDone [] async_id=49
        087: kConditional []
          false_branch:
            088: kCustomCall [] kCustomCall
          true_branch:
            089: kCopy [] kCopy
            090: kCopy [] kCopy
"""
METADATA = """\
    profile_annotation: "while.6"
    thunk_id: 8
    profile_annotation: "while.7"
    thunk_id: 47
"""
LOOP = '  %while.7 = (s32[], bf16[2]{0}) while(%tuple), body=%b, backend_config={"known_trip_count":{"n":"46"}}\n'


def test_launches_are_counted():
    """Of the shorter branch and of the longer, in every trip; a loop that is not counted makes the host wait."""
    assert launch_figures(read_thunks(THUNKS, METADATA, LOOP)) == {
        "layers": [[1, 2], [46, 2]],
        "least": 1 + 1 + 46 * 2,
        "most": 1 + 2 + 46 * 3,
        "outside_graphs": 2,
        "custom_calls": 2,
        "custom_calls_outside_graphs": 1,
        "host_waits": 2,
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
