"""Every Pallas Mosaic GPU name that differs between jax 0.11.2 and 0.12, or may soon, in one place.

Kernels take from here the entry point (explicit compiler parameters; the bare default backend is another one), the
interpreter, and the few calls that the interpreter cannot run as the hardware does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SWIZZLE_BYTES = 128  # the widest swizzle, and the row of a tile that both TMA and wgmma like best


def gpu_kernel(
    body: Callable[..., None],
    *,
    name: str,
    out_type: Any,
    grid: Mapping[str, int],
    scratch: Mapping[str, Any],
    warpgroups: int = 1,
    reduction_scratch_bytes: int = 0,
    unsafe_no_auto_barriers: bool = False,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Callable[..., Any]:
    """A Mosaic GPU kernel: `body(*operand_refs, *output_refs, **scratch_refs)`, one run per grid point.

    Args:
        body: reads its place with `lax.axis_index` of the grid's names and, when there are several, "warpgroup".
        name: of the compiled kernel, as profilers show it.
        out_type: pytree of `jax.ShapeDtypeStruct`; operands that are refs may be written in place.
        grid: axis names and sizes, the fastest last.
        scratch: shared memory and barriers by name.
        warpgroups: how many groups of 128 threads.
        reduction_scratch_bytes: shared memory for reductions from one warp to another, which is 4 values of one sum.
        unsafe_no_auto_barriers: no barriers around stores, for a kernel that reads nothing that it writes.
        interpret: run on the CPU with these parameters instead of compiling.
    """
    threads = {"num_threads": warpgroups, "thread_name": "warpgroup"} if warpgroups > 1 else {}
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=dict(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=reduction_scratch_bytes,  # 0: reductions stay in a warp; shared memory is scarce
            unsafe_no_auto_barriers=unsafe_no_auto_barriers,
        ),
        interpret=interpret,
        **threads,
    )


def interpret_params(*, detect_races: bool = True) -> plgpu.InterpretGPUParams:
    """Parameters that run a kernel on the CPU. Memory starts as NaN.

    A plain read out of bounds raises, and so does a race from 0.12 on; 0.11.2 prints it. What wgmma reads escapes
    the detector, and TMA reads zeros out of bounds.
    """
    return plgpu.InterpretGPUParams(detect_races=detect_races)


def reset_interpreter() -> None:
    """Clears the interpreter's state, which an exception in a kernel leaves unusable."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # not exported in any release yet

    gpu_callbacks.reset_gpu_interpret_mode_state()


def with_own_reduction_scratch(body: Callable[[], None], warpgroup: int, size: int) -> Callable[[], None]:
    """`body`, run by one of several warpgroups, with reductions that go from one warp to another.

    Mosaic places the `size` bytes of scratch for these behind the shared memory in scope, which is the same place for
    every warpgroup; so each gets some more in scope than the one before. Compiled, that costs nothing but the bytes.
    The interpreter needs no scratch, and would wait for the other warpgroups to allocate.
    """
    if warpgroup == 0:
        return body
    padding = plgpu.SMEM((warpgroup * size,), jax.numpy.int8)
    return lambda: pl.run_scoped(lambda _: body(), padding, collective_axes="warpgroup")


def swizzled_tile(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, columns: int | None = None) -> Any:
    """Shared memory in tiles of 8 rows of up to 128 bytes, swizzled: what TMA writes and wgmma reads.

    `columns`: of a tile; as many as 128 bytes hold when not given. wgmma wants both operands swizzled alike.
    """
    itemsize = jax.numpy.dtype(dtype).itemsize
    columns = columns or SWIZZLE_BYTES // itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * itemsize))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def synchronise(barrier: Any) -> None:
    """Arrives at a barrier and waits for the others (0.12 has one call for both)."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def accumulate(total: jax.Array, issue: Callable[[Any], None], *, interpreted: bool) -> jax.Array:
    """total + the products that `issue(accumulator)` starts, waited for.

    The interpreter knows no initialised accumulator, so it adds afterwards.
    """
    if not interpreted:
        return pl.run_state(issue)(plgpu.ACC.init(total))
    return total + product(issue, total.shape)


def product(issue: Callable[[Any], None], shape: tuple[int, int]) -> jax.Array:
    """The products that `issue(accumulator)` starts from zero, waited for, in float32."""

    def run(accumulator: Any) -> jax.Array:
        issue(accumulator)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jax.numpy.float32))


def store_global(ref: Any, value: jax.Array) -> None:
    """Stores registers to global memory, in whatever layout they have (0.11.2 has no other store than this one's)."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def not_hopper() -> str | None:
    """Why the device that is traced for cannot run Hopper kernels, or None if it can.

    That device is the one of the mesh in use, else the default one. A mesh may be of absent devices, of which only
    the kind is known.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        default = jax.config.jax_default_device
        device = default if isinstance(default, jax.Device) else jax.devices(default)[0]
    if re.search(r"\bG?H(20|100|200|800)\b", device.device_kind):
        return None
    return f"it needs a Hopper GPU (sm_90): got {device.device_kind}"
