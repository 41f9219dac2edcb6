"""Compiles programs for an H200 without one, and reports what ptxas and XLA say of them.

`h200_kernels.json` holds the figures of the kernels as shipped, and `test_h200.py` compares. After a change that is
meant, or of the locked jax, write the table anew and read the diff:

    python tests/h200.py --write

Without `--write` it prints the figures as JSON, of the programs named or of all. Add a program to `PROGRAMS`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
TABLE = HERE / "h200_kernels.json"


class Program(NamedTuple):
    """What to compile.

    Attributes:
        function: takes `arguments`, by position.
        arguments: pytrees of `jax.ShapeDtypeStruct`.
        pools: those of them that must not be copied.
        donated: which arguments the caller gives up.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    pools: tuple[Any, ...]
    donated: tuple[int, ...]


def append_program(
    rows: int, tokens: int, dtype: str = "bfloat16", donated: tuple = (0, 1), **options: Any
) -> Program:
    """The fused append into 8 layers of 128 pages of 64 slots."""
    from jax import ShapeDtypeStruct as shape

    from pallas_kernels.latent_append import norm_rope_append

    pools = shape((8, 128, 64, 512), dtype), shape((8, 128, 64, 64), dtype)
    placed = shape((), "int32"), shape((rows, tokens), "int32")
    computed = shape((rows, tokens, 576), dtype), shape((512,), dtype), shape((rows, tokens, 2, 32), "float32")
    function = functools.partial(norm_rope_append, eps=1e-6, **options)  # chooses its backend itself
    return Program(function, (*pools, *placed, *computed), pools, donated)


def append_scan_program(blocks: int, donated: tuple = (0, 1)) -> Program:
    """A scan over layers of `blocks` appends each, whose pools it carries; XLA attends to what was appended."""
    import jax
    import jax.numpy as jnp

    step = append_program(8, 4)

    def layers(latent_pool, rope_pool, slots, projected, norm_weight, angles):
        def layer(carry, index):
            *pools, x = carry
            for block in range(blocks):
                pools = step.function(*pools, blocks * index + block, slots, x, norm_weight, angles)
                seen = (pool[blocks * index + block, slots[:, :1] // 64].reshape(8, 64, -1) for pool in pools)
                keys = jnp.concatenate([*seen], axis=-1)
                scores = jax.nn.softmax(jnp.einsum("btw,bnw->btn", x, keys).astype(jnp.float32))
                x = x + jnp.einsum("btn,bnw->btw", scores.astype(x.dtype), keys)
            return (*pools, x), None

        return jax.lax.scan(layer, (latent_pool, rope_pool, projected), jnp.arange(8 // blocks))[0]

    return Program(layers, (*step.arguments[:2], *step.arguments[3:]), step.pools, donated)


def fp8_append_program(rows: int, tokens: int) -> Program:
    """The fused append into FP8 pools."""
    from jax import ShapeDtypeStruct as shape

    from pallas_kernels.latent_append import norm_rope_append

    plain = append_program(rows, tokens)
    pools = shape((8, 128, 64, 512), "float8_e4m3fn"), plain.pools[1], shape((8, 128, 4, 64), "float32")
    blocks = shape((8, 128, 64, 4, 128), "float8_e4m3fn")  # as the kernel has the latents

    def append(latent_pool, rope_pool, scale_pool, *arrays):
        return norm_rope_append(latent_pool, rope_pool, *arrays, eps=1e-6, scale_pool=scale_pool)

    return Program(append, (*pools, *plain.arguments[2:]), (*pools, blocks), (0, 1, 2))


def fp8_append_scan_program() -> Program:
    """A scan over layers, whose FP8 pools it carries; XLA reads what was appended."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.fp8 import dequantize

    step = fp8_append_program(8, 4)

    def layers(latent_pool, rope_pool, scale_pool, slots, projected, norm_weight, angles):
        def layer(carry, index):
            *pools, x = carry
            latent, rope, scale = step.function(*pools, index, slots, x, norm_weight, angles)
            page = index, slots // 64
            latents = dequantize(latent[page], scale[page].swapaxes(-1, -2))
            seen = jnp.concatenate([latents, rope[page].astype(jnp.float32)], axis=-1)
            return (latent, rope, scale, x + seen.mean(axis=2).astype(x.dtype)), None

        return jax.lax.scan(layer, (latent_pool, rope_pool, scale_pool, projected), jnp.arange(8))[0]

    return Program(layers, (*step.arguments[:3], *step.arguments[4:]), step.pools, step.donated)


class Attention(NamedTuple):
    """A call of attention over rows of up to 4096 tokens."""

    rows: int
    tokens: int
    heads: int
    page_size: int = 64
    dtype: str = "bfloat16"
    tree: bool = False
    sliding_window: int | None = None


def attention_program(call: Attention) -> Program:
    """The call, with its split table."""
    from jax import ShapeDtypeStruct as shape

    from pallas_kernels.paged_mla import paged_mla

    rows, tokens, heads, page_size, dtype, tree, sliding_window = call
    columns = 4096 // page_size
    pages = (8, rows * columns + 1, page_size)
    pools = shape((*pages, 512), dtype), shape((*pages, 64), "bfloat16")
    queries = (shape((rows, tokens, heads, width), "bfloat16") for width in (512, 64))
    where = (shape(size, "int32") for size in ((), (rows, columns), (rows,), (rows,)))
    scale_pool = None if dtype == "bfloat16" else shape((*pages[:2], 4, page_size), "float32")
    tree_mask = shape((rows, tokens, 2), "uint32") if tree else None

    def attend(scale_pool, tree_mask, *arrays):
        masks = {"tree_mask": tree_mask, "sliding_window": sliding_window}
        return paged_mla(*arrays, scale=0.1, scale_pool=scale_pool, **masks)

    return Program(attend, (scale_pool, tree_mask, *queries, *pools, *where), pools, ())


def round_program(name: str, rows: int, num_drafts: int, context: int) -> Program:
    """A decode round of a released architecture (a name in test_config.py) in bfloat16, every row `context` long."""
    import jax
    import jax.numpy as jnp
    from test_config import RELEASED

    import jaxspec
    from jaxspec.decoding.state import pages_per_row
    from jaxspec.models.params import param_specs

    config = jaxspec.ModelConfig.from_hf(RELEASED[name])
    spec = jaxspec.SpeculativeConfig(num_speculative_tokens=num_drafts)

    def init() -> jaxspec.DecodeState:
        pages = rows * pages_per_row(context, num_drafts, 64) + 1
        cache = jaxspec.KVCache.create(config, pages, 64, jnp.bfloat16)
        sampling = jaxspec.SamplingState.stack([(jaxspec.SamplingParams(temperature=0.0), 0, ())] * rows, 1)
        return jaxspec.init_state(config, spec, cache, sampling, context)

    def advance(params: Any, state: jaxspec.DecodeState) -> tuple:
        return jaxspec.decode_round(params, config, spec, state)

    state, declared = jax.eval_shape(init), param_specs(config)
    params = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype or jnp.bfloat16), declared)
    return Program(advance, (params, state), (state.cache.latent, state.cache.rope), (1,))


FP8 = "float8_e4m3fn"
ATTENTION = {  # every line of the tuning table, every page size and mask
    "attention 16x1, 16 heads": Attention(16, 1, 16),
    "attention 16x1, 20 heads, pages of 128": Attention(16, 1, 20, 128),
    "attention 16x2, 16 heads": Attention(16, 2, 16),
    "attention 16x2, 20 heads, pages of 32": Attention(16, 2, 20, 32),
    "attention 16x3, 16 heads": Attention(16, 3, 16),
    "attention 16x4, 16 heads": Attention(16, 4, 16),
    "attention 16x4, 20 heads, pages of 16": Attention(16, 4, 20, 16),
    "attention 16x6, 16 heads": Attention(16, 6, 16),
    "attention 16x1, 64 heads": Attention(16, 1, 64),
    "attention 16x2, 128 heads, pages of 16": Attention(16, 2, 128, 16),
    "attention 16x4, 128 heads, pages of 128": Attention(16, 4, 128, 128),
    "attention 16x5, 16 heads, tree": Attention(16, 5, 16, tree=True),
    "attention 16x16, 16 heads, tree": Attention(16, 16, 16, tree=True),
    "attention 16x3, 16 heads, window": Attention(16, 3, 16, sliding_window=1024),
    "attention 16x2, 64 heads, window": Attention(16, 2, 64, sliding_window=1024),
    "prefill 1x2048, 16 heads": Attention(1, 2048, 16),
    "FP8 attention 16x1, 16 heads": Attention(16, 1, 16, dtype=FP8),
    "FP8 attention 16x1, 20 heads, pages of 16": Attention(16, 1, 20, 16, FP8),
    "FP8 attention 16x2, 16 heads": Attention(16, 2, 16, dtype=FP8),
    "FP8 attention 16x2, 20 heads, pages of 128": Attention(16, 2, 20, 128, FP8),
    "FP8 attention 16x1, 128 heads": Attention(16, 1, 128, dtype=FP8),
    "FP8 attention 16x5, 16 heads, tree": Attention(16, 5, 16, dtype=FP8, tree=True),
    "FP8 prefill 1x2048, 16 heads": Attention(1, 2048, 16, dtype=FP8),
}
PROGRAMS: dict[str, Callable[[], Program]] = {
    "append decode 8x4": functools.partial(append_program, 8, 4),
    "append decode 1x1": functools.partial(append_program, 1, 1),
    "append chunk 1x2048": functools.partial(append_program, 1, 2048),
    "append half-split": functools.partial(append_program, 8, 4, interleave=False),
    "append with a multiplier": functools.partial(append_program, 8, 4, multiplier=2.3),
    "append float32": functools.partial(append_program, 8, 4, "float32"),
    "append in a scan": functools.partial(append_scan_program, 1),
    "append twice a layer in a scan": functools.partial(append_scan_program, 2),
    "append FP8 8x4": functools.partial(fp8_append_program, 8, 4),
    "append FP8 in a scan": fp8_append_scan_program,
    **{name: functools.partial(attention_program, call) for name, call in ATTENTION.items()},
}
# Not in the table, for they change with the model's code: whole rounds.
ROUNDS = {
    "round of V2-Lite, 16 rows": functools.partial(round_program, "V2-Lite", 16, 0, 4096),
    "round of GLM-4.7-Flash, 16 rows, 3 drafts": functools.partial(round_program, "GLM-4.7-Flash", 16, 3, 4096),
}
# Nor these: programs with a known fault, to show that the figures tell.
FAULTY = {
    "append, pools kept": functools.partial(append_program, 8, 4, donated=()),
    "append in a scan, pools kept": functools.partial(append_scan_program, 1, donated=()),
}


def compilers() -> dict[str, str | None]:
    """Versions of what turns a kernel into machine code. JAX assembles with nvJitLink where it finds it."""
    installed = {dist.name.lower(): dist.version for dist in distributions()}
    return {name: installed.get(name) for name in ("jaxlib", "nvidia-nvjitlink")}


def figures(name: str) -> dict[str, Any]:
    """Compiles a program in a process of its own.

    Of its own, because the flags that tests set for the CPU would make bad GPU code, because they and the folder of
    dumps are read when JAX starts, and because a kernel compiled before is not compiled again.

    Returns:
        `kernels`: by name, the figures (`kernel_figures`) of each variant compiled; `pool_copies`: how many
        instructions copy a pool; `temporary_bytes`: of device memory, besides arguments and results. Of a round also
        `memory`: bytes of arguments, of those results that are not arguments overwritten, and of machine code, of
        which XLA says 0 without a GPU; and `launches` (`launch_figures`).

    Raises:
        RuntimeError: the process failed; its errors.
    """
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "MOSAIC_", "PYTHONWARN"))}
    with tempfile.TemporaryDirectory() as dumps:
        done = subprocess.run(
            [sys.executable, __file__, name, "--dumps", dumps],
            env=keep | {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": dumps, "XLA_FLAGS": f"--xla_dump_to={dumps}"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"compiling {name!r} for an H200 failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def kernel_figures(ptxas: str, ptx: str, launch: str) -> dict[str, int | str]:
    """Figures of one kernel from the reports of ptxas, the PTX, and the module that launches it.

    Registers are per thread, as launched; a kernel may shift them between its warpgroups. Spills count stores and
    loads. Shared memory is what a block asks for, static and dynamic; places in it that reductions from one warp to
    another use must be as many as warpgroups that reduce.
    """
    code = re.sub("//.*", "", ptx)
    spills = re.search(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", ptxas)
    static = re.search(r"(\d+) bytes smem", ptxas)
    dynamic = re.search(r"dynamic_shared_memory_size %c(\d+)_i32", launch)
    scratches = re.findall(r"\boffset = (\d+) : i32, scratch_size = [1-9]", launch)
    return {
        "target": re.search(r"^\.target (\w+)", code, re.MULTILINE)[1],
        "registers": int(re.search(r"Used (\d+) registers", ptxas)[1]),
        "spill_bytes": sum(map(int, spills.groups())),
        "static_shared_bytes": int(static[1]) if static else 0,
        "dynamic_shared_bytes": int(dynamic[1]),
        "reduction_scratches": len(set(scratches)),
        "wgmma": code.count("wgmma.mma_async."),
        "tma": code.count("cp.async.bulk.tensor."),
        "barriers": code.count("bar.sync"),
        "performance_warnings": ptxas.count("Potential Performance Loss"),  # products of wgmma made to wait, say
    }


def pool_copies(hlo: str, pools: tuple[Any, ...]) -> int:
    """How many instructions of an optimised program copy an array of a pool's shape."""
    short = {"bfloat16": "bf16", "float32": "f32", "float8_e4m3fn": "f8e4m3fn"}
    shapes = {f"{short[str(pool.dtype)]}[{','.join(map(str, pool.shape))}]" for pool in pools}
    copied = re.findall(r" = \(?(\w+\[[\d,]*\])[^=\n]* (?:copy|copy-start)\(", hlo)
    return sum(shape in shapes for shape in copied)


class Thunk(NamedTuple):
    """One thing that XLA does in running a program, or a label over several: the body of a loop, or a branch.

    Attributes:
        kind: "kCustomKernel", "kWhile" and the like; "body" and the like for a label.
        trips: of a loop; 1 for others, and for a loop that only the GPU can tell the trips of.
        counted: False for such a loop.
        children: what it consists of.
    """

    kind: str
    trips: int
    counted: bool
    children: list[Thunk]

    def launches(self, branch: Callable[..., int] = min, but: str = "") -> int:
        """How many kernels and copies start in it: its leaves, each as often as it runs, of one branch each time.

        `but`: a kind that does not count.
        """
        if self.kind in ("condition", "kAsyncDone", but):  # no condition of a loop with known trips is evaluated
            return 0
        if self.kind == "kConditional":
            return branch(label.launches(branch, but) for label in self.children)
        if self.children or not self.kind.startswith("k"):
            return self.trips * sum(child.launches(branch, but) for child in self.children)
        return 1

    def walk(self, but: str = "") -> Iterator[Thunk]:
        """It, and all that it consists of, but for a kind and what that consists of."""
        if self.kind != but:
            yield self
            for child in self.children:
                yield from child.walk(but)


def read_thunks(dump: str, metadata: str, hlo: str) -> Thunk:
    """XLA's plan of execution, from its dumps thunk_sequence_after_thunk_passes and thunk_metadata, and the HLO."""
    names = dict(re.findall(r'profile_annotation: "(.*)"\s+thunk_id: (\d+)', metadata))
    counts = re.findall(r'^ *(?:ROOT )?%(\S+) = .* while\(.*"known_trip_count":{"n":"(\d+)"}', hlo, re.MULTILINE)
    trips = {int(names[loop]): int(count) for loop, count in counts if loop in names}
    root = Thunk("program", 1, True, [])
    open_thunks = [(-1, root)]  # with their indentations
    for line in dump.splitlines():
        found = re.match(r"( *)(?:(\d+): (k\w+)|(\w+):$)", line)
        if found is None:
            continue
        # The dump indents every label but this one, which follows its loop.
        indentation = open_thunks[-1][0] + 2 if found[4] == "condition" else len(found[1])
        while open_thunks[-1][0] >= indentation:
            open_thunks.pop()
        counted = found[3] != "kWhile" or int(found[2]) in trips
        times = trips.get(int(found[2]), 1) if found[3] == "kWhile" else 1
        thunk = Thunk(found[3] or found[4], times, counted, [])
        open_thunks[-1][1].children.append(thunk)
        open_thunks.append((indentation, thunk))
    return root


def launch_figures(program: Thunk) -> dict[str, Any]:
    """What the GPU is told to start in a run of a program.

    Returns:
        `layers`: of each loop with a custom call in it, which here is a kernel of Pallas, trips and launches of a
        trip; `least` and `most`: launches of a run that takes the branches with the fewest or the most;
        `outside_graphs`: how many of the least are in no command buffer, and so in no CUDA graph; `custom_calls` and
        `custom_calls_outside_graphs`: in the program, not in a run; `host_waits`: branches and loops there that the
        host decides, for which it must wait for the GPU.
    """

    def custom_calls(thunks: Iterable[Thunk]) -> int:
        return sum(thunk.kind == "kCustomCall" for thunk in thunks)

    loops = [thunk for thunk in program.walk() if thunk.kind == "kWhile" and custom_calls(thunk.walk())]
    outside = list(program.walk(but="kCommandBuffer"))
    return {
        "layers": [[loop.trips, loop.launches() // loop.trips] for loop in loops],
        "least": program.launches(),
        "most": program.launches(max),
        "outside_graphs": program.launches(but="kCommandBuffer"),
        "custom_calls": custom_calls(program.walk()),
        "custom_calls_outside_graphs": custom_calls(outside),
        "host_waits": sum(thunk.kind == "kConditional" or not thunk.counted for thunk in outside),
    }


def _compile(program: Program) -> Any:
    """The program, compiled for an H200."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    config = (HERE / "h200.txtpb").read_text()
    devices = topologies.get_topology_desc("", "cuda", topology="1x1x1", target_config=config).devices
    mesh = jax.sharding.Mesh(devices, ("device",))
    here = NamedSharding(mesh, PartitionSpec())
    place = functools.partial(jax.tree.map, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # says what device is traced for
        traced = jax.jit(program.function, donate_argnums=program.donated).trace(*place(program.arguments))
    return traced.lower().compile()


def _measure(name: str, dumps: Path) -> dict[str, Any]:
    """Compiles in this process, and reads the HLO and what Mosaic dumped."""
    program = (PROGRAMS | ROUNDS | FAULTY)[name]()
    compiled = _compile(program)
    hlo = compiled.as_text()
    kernels: dict[str, list] = {}
    for report in sorted(dumps.glob("*.ptxas"), key=lambda p: int(p.stem.rpartition("_")[2])):
        texts = (report.with_suffix(s).read_text() for s in (".ptxas", ".ptx", ".before_layout_inference.txt"))
        kernels.setdefault(report.stem.rpartition("_")[0], []).append(kernel_figures(*texts))
    memory = compiled.memory_analysis()
    found = {"kernels": kernels, "pool_copies": pool_copies(hlo, program.pools)}
    found["temporary_bytes"] = memory.temp_size_in_bytes
    if name not in ROUNDS:
        return found
    (plan,), (metadata,) = (
        [path.read_text() for path in dumps.glob(f"*.jit_advance.thunk_{part}.txt")]
        for part in ("sequence_after_thunk_passes", "metadata")
    )
    new_bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes
    sizes = {"arguments": memory.argument_size_in_bytes, "results": new_bytes}
    sizes["code"] = memory.generated_code_size_in_bytes
    return found | {"memory": sizes, "launches": launch_figures(read_thunks(plan, metadata, hlo))}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="PROGRAM", help="of: " + ", ".join(PROGRAMS | ROUNDS | FAULTY))
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--dumps", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dumps:
        print(json.dumps(_measure(*options.names, options.dumps)))
        return
    measured = {name: figures(name) for name in (not options.write and options.names) or PROGRAMS}
    text = json.dumps({"compilers": compilers(), "programs": measured}, indent=1) + "\n"
    if options.write:
        TABLE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
