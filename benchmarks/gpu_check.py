"""What a Hopper GPU says of the kernels: right first, then how fast, then a whole decode round.

    python benchmarks/gpu_check.py [--small --backend xla]

Needs jax with CUDA and this repository, nothing else, and less than five minutes. Every kernel is compared with XLA
in float32 at the shapes that are timed; nothing is timed if one differs. Shares are of a copy and of a product of
matrices measured in the same run. `--small` runs all of it in a minute, on a CPU too, to check the script itself.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.cache import capacity as ledger_ops
from jaxspec.decoding import Finish
from jaxspec.decoding.state import pages_per_row
from jaxspec.models.params import init_params
from pallas_kernels.latent_append import norm_rope_append
from pallas_kernels.paged_mla import default_parts, make_splits, paged_mla

LATENT, ROPE, PAGE_SIZE, SCALE = 512, 64, 64, 192**-0.5
RESULTS = Path(__file__).parent / "results" / "gpu_check.json"
TOLERANCE = 2e-2  # bfloat16 results of values of order 1
LAYERS = 2  # of the pools: calls read them by turns, so that no cache of the GPU serves the next call


class Shape(NamedTuple):
    """Rows of `context` tokens each, with `num_queries` tokens of `heads` heads to attend."""

    rows: int
    context: int
    heads: int
    num_queries: int
    varlen: bool = False

    @property
    def name(self) -> str:
        """As in FlashMLA's benchmark."""
        kind = " varlen" if self.varlen else ""
        return f"b{self.rows} x {self.context}{kind}, h{self.heads}, s_q {self.num_queries}"


def shapes(small: bool) -> Iterator[Shape]:
    """FlashMLA's, with the verification of 1 to 4 drafts; and vLLM's of short contexts."""
    if small:
        yield from (Shape(2, 200, 16, 2), Shape(2, 130, 4, 1, varlen=True))
        return
    for context, heads, num_queries in itertools.product((4096, 32768), (16, 64, 128), (1, 2, 4, 5)):
        yield Shape(128, context, heads, num_queries)
    yield from (Shape(128, 4096, heads, 4, varlen=True) for heads in (16, 128))
    yield from (Shape(16, 1024, 16, 1), Shape(128, 1024, 16, 1))


class Case(NamedTuple):
    """Arrays of a shape: queries, pools, page ids and starts, and tokens in the cache in all."""

    queries: tuple[jax.Array, jax.Array]
    pools: tuple[jax.Array, jax.Array]
    page_ids: jax.Array
    start: jax.Array
    length: jax.Array
    num_cached: int


def make_case(shape: Shape) -> Case:
    """Random values; pages in no order."""
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 4)
    lens = np.full(shape.rows, shape.context)
    if shape.varlen:
        lens = np.maximum(rng.normal(shape.context, shape.context / 2, shape.rows), shape.num_queries).astype(int)
        lens = np.minimum(lens, 2 * shape.context)
    columns = -(-int(lens.max()) // PAGE_SIZE)
    pages = shape.rows * columns + 1
    ids = 1 + rng.permutation(pages - 1).reshape(shape.rows, columns)
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    sizes = (shape.rows, shape.num_queries, shape.heads), (LAYERS, pages, PAGE_SIZE)
    arrays = [draw(key, (*sizes[i // 2], (LATENT, ROPE)[i % 2])) for i, key in enumerate(keys)]
    start = jnp.asarray(lens - shape.num_queries, jnp.int32)
    length = jnp.full(shape.rows, shape.num_queries, jnp.int32)
    return Case(tuple(arrays[:2]), tuple(arrays[2:]), jnp.asarray(ids, jnp.int32), start, length, int(lens.sum()))


def attend(case: Case, layer: jax.Array, backend: str | None) -> jax.Array:
    """One call of the op, its split table included."""
    num_queries, heads = case.queries[0].shape[1:3]
    splits = make_splits(case.start, case.length, default_parts(num_queries * heads))
    where = (layer, case.page_ids, case.start, case.length)
    return paged_mla(*case.queries, *case.pools, *where, SCALE, splits=splits, backend=backend)


@functools.partial(jax.jit, static_argnames="backend")
def attention_error(case: Case, backend: str | None) -> jax.Array:
    """Largest difference from XLA in float32."""
    wide = case._replace(
        queries=tuple(q.astype(jnp.float32) for q in case.queries),
        pools=tuple(p[1:].astype(jnp.float32) for p in case.pools),
    )
    found = attend(case, jnp.int32(1), backend).astype(jnp.float32)
    return jnp.max(jnp.abs(found - attend(wide, jnp.int32(0), "xla")))


@functools.partial(jax.jit, static_argnames=("backend", "times"))
def attend_often(case: Case, backend: str | None, times: int) -> jax.Array:
    """Calls by turns over the layers, each of which waits for the one before."""

    def step(i: jax.Array, q_latent: jax.Array) -> jax.Array:
        found = attend(case._replace(queries=(q_latent, case.queries[1])), i % LAYERS, backend)
        return q_latent + 1e-6 * found

    return jax.lax.fori_loop(0, times, step, case.queries[0])


def seconds_per_call(run: Callable[[int], Any], times: int) -> float:
    """Of a program that makes `times` calls, less one that makes a tenth: what a launch costs drops out."""

    def seconds(n: int) -> float:
        jax.block_until_ready(run(n))
        found = []
        for _ in range(3):
            started = time.perf_counter()
            jax.block_until_ready(run(n))
            found.append(time.perf_counter() - started)
        return statistics.median(found)

    few = max(times // 10, 1)
    return (seconds(times) - seconds(few)) / (times - few)


def peaks(small: bool) -> tuple[float, float]:
    """Bytes per second of a copy, read and written; and operations per second of a bfloat16 product."""
    size, side = (2**20, 256) if small else (2**30, 8192)
    x, w = jnp.ones(size, jnp.bfloat16), jnp.ones((side, side), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=1)
    def copies(x: jax.Array, times: int) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: jax.lax.optimization_barrier(x + 1), x)

    @functools.partial(jax.jit, static_argnums=1)
    def products(w: jax.Array, times: int) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, y: (y @ w) * 1e-4, w)

    copy = seconds_per_call(lambda n: copies(x, n), 20)
    product = seconds_per_call(lambda n: products(w, n), 20)
    return 2 * x.nbytes / copy, 2 * side**3 / product


def check_attention(small: bool, backend: str | None) -> list[str]:
    """Names of the shapes at which the kernel is wrong."""
    wrong = []
    for shape in shapes(small):
        # The rows are alike, so a part of them is checked, in float32, where all would not fit beside.
        error = float(attention_error(make_case(shape._replace(rows=min(shape.rows, 8))), backend))
        if not error < TOLERANCE:
            wrong.append(f"attention {shape.name}: {error}")
    return wrong


def time_attention(small: bool, backend: str | None, bandwidth: float, flops: float) -> list[dict[str, Any]]:
    """A line for each shape."""
    lines = []
    for shape in shapes(small):
        case = make_case(shape)
        run = functools.partial(attend_often, case, backend)
        seconds = seconds_per_call(run, 10 if small else 50)
        read = case.num_cached * (LATENT + ROPE) * 2
        done = 2 * (2 * LATENT + ROPE) * shape.heads * shape.num_queries * case.num_cached
        lines.append(
            {
                "shape": shape.name,
                "microseconds": seconds * 1e6,
                "GB/s": read / seconds / 1e9,
                "share of copy": read / seconds / bandwidth,
                "TFLOP/s": done / seconds / 1e12,
                "share of product": done / seconds / flops,
            }
        )
        print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{v:32}" for k, v in lines[-1].items()))
    return lines


def append_arrays(tokens: int) -> tuple:
    """Pools, slots in no order, and what the projection gives."""
    keys = jax.random.split(jax.random.key(1), 3)
    pages = tokens // PAGE_SIZE + 2
    pools = [jnp.zeros((LAYERS, pages, PAGE_SIZE, w), jnp.bfloat16) for w in (LATENT, ROPE)]
    slots = PAGE_SIZE + jax.random.permutation(keys[0], tokens).astype(jnp.int32)[:, None]
    projected = jax.random.normal(keys[1], (tokens, 1, LATENT + ROPE), jnp.bfloat16)
    angles = jax.random.normal(keys[2], (tokens, 1, 2, ROPE // 2))
    return *pools, slots, projected, jnp.ones(LATENT, jnp.bfloat16), angles


@functools.partial(jax.jit, static_argnames=("backend", "times"), donate_argnums=(0, 1))
def append_often(
    latent: jax.Array, rope: jax.Array, *rest: jax.Array, backend: str | None, times: int
) -> tuple[jax.Array, jax.Array]:
    """Appends by turns to the layers."""
    slots, projected, weight, angles = rest

    def step(i: jax.Array, pools: tuple) -> tuple:
        return norm_rope_append(*pools, i % LAYERS, slots, projected, weight, angles, 1e-6, backend=backend)

    return jax.lax.fori_loop(0, times, step, (latent, rope))


def check_append(tokens: int, backend: str | None) -> list[str]:
    """Whether the kernel's pools differ from XLA's."""
    found, expected = (append_often(*append_arrays(tokens), backend=b, times=2) for b in (backend, "xla"))
    error = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(found, expected, strict=True))
    return [] if error < TOLERANCE else [f"append of {tokens} tokens: {error}"]


def time_append(tokens: int, backend: str | None) -> dict[str, Any]:
    """Microseconds of one call."""
    seconds = seconds_per_call(lambda n: append_often(*append_arrays(tokens), backend=backend, times=n), 200)
    line = {"tokens": tokens, "microseconds": seconds * 1e6}
    print(f"append of {tokens} tokens: {seconds * 1e6:.2f} microseconds")
    return line


def v2_lite(small: bool) -> jaxspec.ModelConfig:
    """DeepSeek-V2-Lite's sizes with an MTP module, for there is none with both."""
    return jaxspec.ModelConfig.from_hf(
        {
            "model_type": "deepseek_v3",
            "vocab_size": 512 if small else 102400,
            "hidden_size": 128 if small else 2048,
            "num_hidden_layers": 3 if small else 27,
            "num_attention_heads": 2 if small else 16,
            "num_key_value_heads": 2 if small else 16,
            "q_lora_rank": None,
            "kv_lora_rank": LATENT,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": 128,
            "intermediate_size": 256 if small else 10944,
            "moe_intermediate_size": 64 if small else 1408,
            "n_routed_experts": 8 if small else 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 163840,
            "num_nextn_predict_layers": 1,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
        }
    )


def round_seconds(config: jaxspec.ModelConfig, params: Any, num_drafts: int, rows: int, context: int) -> float:
    """Of a decode round of rows that have `context` tokens cached, whatever they are."""
    spec = jaxspec.SpeculativeConfig(num_speculative_tokens=num_drafts)
    most = context + 4096
    pages = rows * pages_per_row(most, num_drafts, PAGE_SIZE) + 1
    greedy = [(jaxspec.SamplingParams(temperature=0.0), 0, ())] * rows

    @functools.partial(jax.jit, static_argnums=2, donate_argnums=1)
    def rounds(params: Any, state: jaxspec.DecodeState, times: int) -> jaxspec.DecodeState:
        def step(_: jax.Array, state: jaxspec.DecodeState) -> jaxspec.DecodeState:
            return jaxspec.decode_round(params, config, spec, state)[0]

        return jax.lax.fori_loop(0, times, step, state)

    def start() -> jaxspec.DecodeState:
        cache = jaxspec.KVCache.create(config, pages, PAGE_SIZE, jnp.bfloat16)
        state = jaxspec.init_state(config, spec, cache, jaxspec.SamplingState.stack(greedy, 1), most)
        lens = jnp.full(rows, context, jnp.int32)
        (capacity, table), _ = ledger_ops.reserve((state.capacity, state.table), lens, context)
        running, limit = (jnp.full(rows, n, jnp.int32) for n in (Finish.RUNNING, most))
        return state.replace(capacity=capacity, table=table, kv_len=lens, finish=running, limit=limit)

    return seconds_per_call(lambda n: rounds(params, start(), n), 20)


def main() -> int:
    """Checks, then measures; prints as it goes and writes JSON. Returns 1 if a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("mosaic", "xla"), default="mosaic")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to check this script")
    args = parser.parse_args()
    appends = (16,) if args.small else (1024, 8192)
    wrong = check_attention(args.small, args.backend)
    wrong += [fault for tokens in appends for fault in check_append(tokens, args.backend)]
    print("\n".join(f"WRONG: {fault}" for fault in wrong) or "all kernels are right")
    if wrong:
        return 1
    bandwidth, flops = peaks(args.small)
    print(f"copy {bandwidth / 1e9:.0f} GB/s, product {flops / 1e12:.0f} TFLOP/s")
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "copy GB/s": bandwidth / 1e9,
        "product TFLOP/s": flops / 1e12,
        "attention": time_attention(args.small, args.backend, bandwidth, flops),
        "append": [time_append(tokens, args.backend) for tokens in appends],
    }
    config = v2_lite(args.small)
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    rows, context = (2, 100) if args.small else (16, 4096)
    found["round"] = []
    for num_drafts in range(5):
        seconds = round_seconds(config, params, num_drafts, rows, context)
        found["round"].append({"rows": rows, "context": context, "K": num_drafts, "milliseconds": seconds * 1e3})
        print(f"round of {rows} rows at {context}, K = {num_drafts}: {seconds * 1e3:.3f} ms")
    if not args.small:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
