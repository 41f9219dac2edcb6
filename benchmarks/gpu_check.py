"""What a Hopper GPU says of the kernels: right or not, how fast, then whole decode rounds, against the targets.

    python benchmarks/gpu_check.py [--small --backend xla]

Needs jax with CUDA and this repository, nothing else, and less than five minutes. Every call that is timed is also
compared with XLA in float32, in part of its rows, queries and heads; one that is wrong gets no time. Shares are of a
copy and of a product of matrices measured in the same run. `--small` runs all of it in a minute, on a CPU too, to
check the script itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import statistics
import subprocess
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
from pallas_kernels import fp8
from pallas_kernels.latent_append import norm_rope_append
from pallas_kernels.paged_mla import paged_mla, plan_splits

LATENT, ROPE, PAGE_SIZE, SCALE = 512, 64, 64, 192**-0.5
RESULTS = Path(__file__).parent / "results" / "gpu_check.json"
TOLERANCE = 1e-2  # of a bfloat16 result, by the norm of its difference
FP8_STEP = 2**-3  # two roundings to FP8 differ by a step at most
CACHE_BYTES = 2**28  # calls read layers in turn, of as much in all, so that no cache of the GPU serves the next call
UNROLLED = 10  # calls in a trip of the loop, which is one CUDA graph: what the host does in between then drops out
ACCEPTANCE = 0.8  # of a draft, if those before it were accepted


class Peaks(NamedTuple):
    """Measured: bytes a second of a copy, read and written; operations a second of a bfloat16 product."""

    bandwidth: float
    flops: float


class Shape(NamedTuple):
    """Rows of `context` tokens each, of which `num_queries` with `heads` heads attend."""

    rows: int
    context: int
    heads: int
    num_queries: int
    fp8: bool = False
    varlen: bool = False
    tree: bool = False

    @property
    def name(self) -> str:
        """As in FlashMLA's benchmark."""
        kinds = "".join(f" {kind}" for kind in ("fp8", "varlen", "tree") if getattr(self, kind))
        return f"b{self.rows} x {self.context}, h{self.heads}, s_q {self.num_queries}{kinds}"

    @property
    def token_bytes(self) -> int:
        """Of a cached token: FP8 latents have 4 scales in float32, and keys in bfloat16."""
        return LATENT + 4 * LATENT // fp8.BLOCK + 2 * ROPE if self.fp8 else 2 * (LATENT + ROPE)

    @property
    def layers(self) -> int:
        """Of the pools."""
        wanted = math.ceil(CACHE_BYTES / (self.rows * self.context * self.token_bytes))
        return min(max(wanted, 2), 16)

    def lengths(self) -> np.ndarray:
        """Tokens of each row; when they vary, as many in all at most."""
        if not self.varlen:
            return np.full(self.rows, self.context)
        drawn = np.random.default_rng(0).normal(self.context, self.context / 2, self.rows)
        drawn = np.clip(drawn, self.num_queries, 2 * self.context)
        return np.maximum(drawn * min(1, self.context / drawn.mean()), self.num_queries).astype(int)

    def work(self) -> tuple[float, float]:
        """Bytes of the cache, and operations of the tokens it shows to each query (all of a tree's)."""
        before = self.lengths() - self.num_queries
        pairs = self.num_queries * before.sum() + self.rows * self.num_queries * (self.num_queries + 1) / 2
        return float(self.lengths().sum() * self.token_bytes), float(2 * (2 * LATENT + ROPE) * self.heads * pairs)

    def floor(self, peaks: Peaks) -> float:
        """Seconds by the roofline."""
        size, operations = self.work()
        return max(size / peaks.bandwidth, operations / peaks.flops)


def shapes(small: bool) -> Iterator[Shape]:
    """FlashMLA's, with the verification of 0 to 4 drafts; FP8 caches; a tree; vLLM's short contexts; prefill."""
    if small:
        yield from (Shape(2, 200, 16, 2), Shape(2, 130, 4, 1, varlen=True), Shape(3, 150, 4, 2, fp8=True))
        yield from (Shape(2, 130, 4, 16, tree=True), Shape(1, 200, 4, 64))
        return
    for context, heads, num_queries in itertools.product((4096, 32768), (16, 64, 128), (1, 2, 4, 5)):
        yield Shape(128, context, heads, num_queries)
    yield from (Shape(128, 4096, heads, queries, fp8=True) for heads in (16, 128) for queries in (1, 4))
    yield from (Shape(128, 4096, heads, 4, varlen=True) for heads in (16, 128))
    yield Shape(128, 4096, 16, 16, tree=True)
    yield from (Shape(rows, 1024, 16, 1) for rows in (16, 128))
    yield from (Shape(1, 8192, heads, 2048) for heads in (16, 128))


class Case(NamedTuple):
    """Arrays of a shape."""

    queries: tuple[jax.Array, jax.Array]
    pools: tuple[jax.Array, jax.Array]
    scale_pool: jax.Array | None
    tree_mask: jax.Array | None
    page_ids: jax.Array
    start: jax.Array
    length: jax.Array


def make_case(shape: Shape) -> Case:
    """Random values, in the cache with repeats; pages in no order. No shape depends on what the rows' lengths are."""
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 4)
    columns = -(-shape.context // PAGE_SIZE)
    pages = shape.rows * (columns + 1) + 1
    used = -(-shape.lengths() // PAGE_SIZE)
    ids = np.zeros((shape.rows, 2 * columns), np.int32)
    ids[np.arange(2 * columns) < used[:, None]] = 1 + rng.permutation(pages - 1)[: used.sum()]
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    widths, at = (LATENT, ROPE), (shape.rows, shape.num_queries, shape.heads)
    queries = tuple(normal(key, (*at, width)) for key, width in zip(keys, widths, strict=False))
    blocks = [normal(key, (1000, PAGE_SIZE, width)) for key, width in zip(keys[2:], widths, strict=True)]
    if shape.fp8:
        latent, scale = fp8.quantize(blocks[0])
        blocks = [latent, scale.swapaxes(-1, -2), blocks[1]]
    block_of = (jnp.arange(pages)[None] + 17 * jnp.arange(shape.layers)[:, None]) % 1000
    latent, *scale, rope = (block[block_of] for block in blocks)
    length = jnp.full(shape.rows, shape.num_queries, jnp.int32)
    start = jnp.asarray(shape.lengths(), jnp.int32) - length
    mask = random_trees(rng, *at[:2]) if shape.tree else None
    return Case(queries, (latent, rope), scale[0] if scale else None, mask, jnp.asarray(ids), start, length)


def random_trees(rng: np.random.Generator, rows: int, nodes: int) -> jax.Array:
    """Masks of up to 32 nodes a row that see themselves and their ancestors: the parent is any earlier node."""
    masks = np.zeros((rows, nodes, 2), np.uint32)
    for row, node in itertools.product(range(rows), range(nodes)):
        parent = masks[row, rng.integers(node), 0] if node else 0
        masks[row, node, 0] = parent | np.uint32(1 << node)
    return jnp.asarray(masks)


@functools.partial(jax.jit, static_argnames=("backend", "calls"))
def attend_often(case: Case, backend: str, calls: int) -> jax.Array:
    """The result of the last of many calls, by turns over the layers. The splits are made once, as in a round."""
    (_, num_queries, heads, _), pool = case.queries[0].shape, case.pools[0]
    splits = plan_splits(case.start, case.length, num_queries * heads, PAGE_SIZE, str(pool.dtype))
    options = {"scale_pool": case.scale_pool, "tree_mask": case.tree_mask, "splits": splits, "backend": backend}

    def step(i: jax.Array, before: jax.Array) -> jax.Array:
        # A call waits for the one before, whose result says 0 here: independent ones might run side by side.
        layer = (i + jnp.isnan(before[0, 0, 0, 0])) % pool.shape[0]
        return paged_mla(*case.queries, *case.pools, layer, case.page_ids, case.start, case.length, SCALE, **options)

    return jax.lax.fori_loop(0, calls, step, case.queries[0], unroll=min(calls, UNROLLED))


def attention_error(shape: Shape, case: Case, found: jax.Array, layer: int) -> float:
    """Largest difference from XLA in float32, of up to 8 rows' last 8 queries (all of a tree) in 4 heads."""
    rows, heads = np.linspace(0, shape.rows - 1, min(shape.rows, 8)).astype(int), np.array([0, 1, -2, -1])
    first = 0 if shape.tree else max(shape.num_queries - 8, 0)
    places = np.ix_(rows, np.arange(first, shape.num_queries), heads)
    pad = [(0, 0), (0, max(first + 8 - shape.num_queries, 0)), (0, 0), (0, 0)]  # so that shapes share a program
    queries = [jnp.pad(q[places], pad) for q in case.queries]
    ids = case.page_ids[rows]
    pools = [None if pool is None else pool[layer, ids.reshape(-1)][None] for pool in (*case.pools, case.scale_pool)]
    mask = None if case.tree_mask is None else case.tree_mask[rows]
    where = (jnp.arange(ids.size).reshape(ids.shape), case.start[rows] + first, case.length[rows] - first)
    expected = attend_in_float32(queries, pools, mask, *where)[:, : shape.num_queries - first]
    difference = found[places].astype(jnp.float32) - expected
    return float(jnp.max(jnp.linalg.norm(difference, axis=-1) / jnp.linalg.norm(expected, axis=-1)))


@jax.jit
def attend_in_float32(queries: list, pools: list, mask: jax.Array | None, *where: jax.Array) -> jax.Array:
    """By XLA."""
    latent, rope, scale = pools
    wide = [x.astype(jnp.float32) for x in (*queries, latent, rope)]
    if scale is not None:
        wide[2] = fp8.dequantize(latent, scale.swapaxes(-1, -2))
    with jax.default_matmul_precision("highest"):
        return paged_mla(*wide, jnp.int32(0), *where, SCALE, tree_mask=mask, backend="xla")


def seconds_per_call(run: Callable[[], Any], calls: int) -> float:
    """Of a program that makes `calls` calls: from several runs in a row, less one. The host is ahead of the GPU."""

    def seconds(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times - 1):
            run()
        jax.block_until_ready(run())
        return time.perf_counter() - started

    seconds(1)
    times = 1 + min(max(round(0.05 / seconds(1)), 1), 20)
    return statistics.median(seconds(times) - seconds(1) for _ in range(3)) / (times - 1) / calls


def measure_peaks(small: bool) -> Peaks:
    """Of a copy that no cache holds, and of a large product of random matrices."""
    size, side, calls = (2**20, 256, 5) if small else (2**30, 8192, 20)
    x, w = jnp.ones(size, jnp.bfloat16), jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16) * side**-0.5

    @jax.jit
    def copies(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, calls, lambda _, x: x + 1, x)

    @jax.jit
    def products(w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, calls, lambda _, y: y @ w, w)

    copy, product = (seconds_per_call(functools.partial(f, a), calls) for f, a in ((copies, x), (products, w)))
    return Peaks(2 * x.nbytes / copy, 2 * side**3 / product)


def measure_all(
    names: dict[Any, str],
    lower: Callable[[Any], jax.stages.Lowered],
    measure: Callable[[Any, jax.stages.Compiled], dict[str, Any]],
) -> list[dict[str, Any]]:
    """A line for each kind, printed at once. Programs are traced in turn and compiled side by side.

    What fails leaves its error in its line: it must not keep the others from being measured.
    """

    def attempt(function: Callable[..., Any], *args: Any) -> Any:
        try:
            return next((arg for arg in args if isinstance(arg, Exception)), None) or function(*args)
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor() as pool:
        lowered = [attempt(lower, kind) for kind in names]
        programs = list(pool.map(lambda program: attempt(jax.stages.Lowered.compile, program), lowered))
    lines = []
    for (kind, name), program in zip(names.items(), programs, strict=True):
        found = attempt(measure, kind, program)
        lines.append({"what": name} | ({"wrong": repr(found)} if isinstance(found, Exception) else found))
        print_line(lines[-1])
    return lines


def print_line(line: dict[str, Any]) -> None:
    """What there is of it, in columns."""
    numbers = "".join(f"{name} {x:<9.4g}" for name, x in line.items() if isinstance(x, float))
    verdict = f"{'pass' if line['met'] else 'MISS'}: {line['target']}" if "target" in line else ""
    wrong = f"WRONG: {line['wrong']}" if "wrong" in line else ""
    print(f"{line['what']:40}{numbers}{verdict}{wrong}", flush=True)


def judged(name: str, value: float, relation: str, bound: float) -> dict[str, Any]:
    """The part of a line that has a target."""
    return {"target": f"{name} {relation} {bound:.4g}", "met": value >= bound if relation == ">=" else value <= bound}


def check(error: float, bound: float) -> float:
    """The error, if it is within the bound."""
    if not error <= bound:
        raise ValueError(f"error: got {error:.3g}, expected at most {bound}")
    return error


def attention(small: bool, backend: str, peaks: Peaks) -> list[dict[str, Any]]:
    """A line for each shape."""
    microseconds: dict[Shape, float] = {}

    def calls(shape: Shape) -> int:
        return 2 if small else UNROLLED * min(max(int(2e-4 / shape.floor(peaks)), 1), 10)

    def lower(shape: Shape) -> jax.stages.Lowered:
        return attend_often.lower(jax.eval_shape(lambda: make_case(shape)), backend, calls(shape))

    def measure(shape: Shape, program: jax.stages.Compiled) -> dict[str, Any]:
        case = make_case(shape)
        error = check(attention_error(shape, case, program(case), (calls(shape) - 1) % shape.layers), TOLERANCE)
        seconds = seconds_per_call(lambda: program(case), calls(shape))
        microseconds[shape] = seconds * 1e6
        size, operations = shape.work()
        line = {"us": seconds * 1e6, "GB/s": size / seconds / 1e9, "TFLOP/s": operations / seconds / 1e12}
        line |= {"of copy": size / seconds / peaks.bandwidth, "of product": operations / seconds / peaks.flops}
        return line | {"error": error} | attention_target(shape, line, microseconds, peaks)

    return measure_all({shape: f"attention {shape.name}" for shape in shapes(small)}, lower, measure)


def attention_target(shape: Shape, line: dict, microseconds: dict[Shape, float], peaks: Peaks) -> dict[str, Any]:
    """Of the shapes that have one. The fourth draft must cost no more than the roofline says."""
    if shape.num_queries > 5 or shape.fp8 or shape.varlen:
        return {}
    before = shape._replace(num_queries=4)
    if shape.num_queries == 5 and before in microseconds:
        step, slope = line["us"] / microseconds[before], shape.floor(peaks) / before.floor(peaks)
        return {"times s_q 4": step} | judged("times s_q 4", step, "<=", 1.05 * slope)
    if shape.heads == 128:
        return judged("TFLOP/s", line["TFLOP/s"], ">=", 660)
    return judged("of copy", line["of copy"], ">=", 0.9) if shape[:3] == (128, 4096, 16) else {}


def append_arrays(tokens: int, is_fp8: bool) -> tuple:
    """Pools, slots in no order, and what the projection gives."""
    keys = jax.random.split(jax.random.key(1), 3)
    pages, dtype = (2, tokens // PAGE_SIZE + 2), fp8.DTYPE if is_fp8 else jnp.bfloat16
    pools = [jnp.zeros((*pages, PAGE_SIZE, LATENT), dtype), jnp.zeros((*pages, PAGE_SIZE, ROPE), jnp.bfloat16)]
    pools += [jnp.zeros((*pages, LATENT // fp8.BLOCK, PAGE_SIZE))] if is_fp8 else []
    slots = PAGE_SIZE + jax.random.permutation(keys[0], tokens).astype(jnp.int32)[:, None]
    projected = jax.random.normal(keys[1], (tokens, 1, LATENT + ROPE), jnp.bfloat16)
    angles = jax.random.normal(keys[2], (tokens, 1, 2, ROPE // 2))
    return pools, slots, projected, jnp.ones(LATENT, jnp.bfloat16), angles


@functools.partial(jax.jit, static_argnames=("backend", "calls"), donate_argnums=0)
def append_often(pools: list, slots: Any, projected: Any, weight: Any, angles: Any, backend: str, calls: int) -> list:
    """Appends by turns to the two layers."""
    unrolled = min(calls, 5 * UNROLLED)

    def trip(_: jax.Array, pools: list) -> list:
        for call in range(unrolled):
            latent, rope, *scale = pools
            options = {"scale_pool": scale[0] if scale else None, "backend": backend}
            new = slots, projected, weight, angles, 1e-6
            pools = list(norm_rope_append(latent, rope, jnp.int32(call % 2), *new, **options))
        return pools

    return jax.lax.fori_loop(0, calls // unrolled, trip, pools)


def append(small: bool, backend: str) -> list[dict[str, Any]]:
    """A line for each number of tokens and kind of cache."""
    calls = 2 if small else 100

    def lower(kind: tuple[int, bool]) -> jax.stages.Lowered:
        return append_often.lower(*jax.eval_shape(lambda: append_arrays(*kind)), backend=backend, calls=calls)

    def measure(kind: tuple[int, bool], program: jax.stages.Compiled) -> dict[str, Any]:
        pools, *rest = append_arrays(*kind)
        pools = program(pools, *rest)
        line = {"error": check(append_error(pools, *kind), FP8_STEP if kind[1] else TOLERANCE)}

        def run() -> list:
            pools[:] = program(pools, *rest)
            return pools

        line["us"] = seconds_per_call(run, calls) * 1e6
        return line | (judged("us", line["us"], "<=", 4) if kind[0] == 1024 else {})

    kinds = itertools.product((16,) if small else (1024, 8192), (False, True))
    return measure_all({kind: f"append {kind[0]} tokens{' fp8' * kind[1]}" for kind in kinds}, lower, measure)


def append_error(pools: list, tokens: int, is_fp8: bool) -> float:
    """Largest difference of either layer from what XLA appends, by the size of the values but at least 1."""

    def values(pools: list) -> jax.Array:
        latent, rope, *scale = pools
        latent = fp8.dequantize(latent, scale[0].swapaxes(-1, -2)) if scale else latent.astype(jnp.float32)
        return jnp.concatenate([latent, rope.astype(jnp.float32)], axis=-1)

    expected = values(append_often(*append_arrays(tokens, is_fp8), backend="xla", calls=1))[0]
    return float(jnp.max(jnp.abs(values(pools) - expected[None]) / jnp.maximum(jnp.abs(expected), 1)[None]))


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


def start_state(config: jaxspec.ModelConfig, num_drafts: int, rows: int, context: int) -> jaxspec.DecodeState:
    """Rows that have `context` tokens cached, whatever they are."""
    spec, most = jaxspec.SpeculativeConfig(num_speculative_tokens=num_drafts), context + 4096
    pages = rows * pages_per_row(most, num_drafts, PAGE_SIZE) + 1
    cache = jaxspec.KVCache.create(config, pages, PAGE_SIZE, jnp.bfloat16)
    sampling = jaxspec.SamplingState.stack([(jaxspec.SamplingParams(temperature=0.0), 0, ())] * rows, 1)
    state = jaxspec.init_state(config, spec, cache, sampling, most)
    lens = jnp.full(rows, context, jnp.int32)
    (capacity, table), _ = ledger_ops.reserve((state.capacity, state.table), lens, context)
    running, limit = (jnp.full(rows, n, jnp.int32) for n in (Finish.RUNNING, most))
    return state.replace(capacity=capacity, table=table, kv_len=lens, finish=running, limit=limit)


@functools.partial(jax.jit, static_argnames=("config", "num_drafts", "times"), donate_argnums=1)
def rounds(params: Any, state: Any, config: jaxspec.ModelConfig, num_drafts: int, times: int) -> jaxspec.DecodeState:
    """Decode rounds, one after the other."""
    spec = jaxspec.SpeculativeConfig(num_speculative_tokens=num_drafts)
    return jax.lax.fori_loop(0, times, lambda _, s: jaxspec.decode_round(params, config, spec, s)[0], state)


def generation(small: bool) -> list[dict[str, Any]]:
    """A line for each number of drafts K. Rounds are timed; what they would emit at ACCEPTANCE is reckoned.

    Weights are random, so that hardly a draft is accepted; but a round takes as long whatever it accepts.
    """
    config, times = v2_lite(small), 2 if small else 10
    rows, context = (2, 100) if small else (16, 4096)
    make_params = functools.partial(init_params, config, jax.random.key(0), jnp.bfloat16)
    params = functools.cache(make_params)

    def lower(num_drafts: int) -> jax.stages.Lowered:
        state = jax.eval_shape(lambda: start_state(config, num_drafts, rows, context))
        return rounds.lower(jax.eval_shape(make_params), state, config=config, num_drafts=num_drafts, times=times)

    def measure(num_drafts: int, program: jax.stages.Compiled) -> dict[str, Any]:
        state = start_state(config, num_drafts, rows, context)

        def run() -> jax.Array:
            nonlocal state
            state = program(params(), state)
            return state.kv_len

        seconds, emitted = seconds_per_call(run, times), sum(ACCEPTANCE**i for i in range(num_drafts + 1))
        return {"ms": seconds * 1e3, "tokens if accepted": float(emitted), "tokens/s/row": emitted / seconds}

    kinds = (0, 2) if small else range(5)
    return measure_all({k: f"round b{rows} x {context}, K {k}" for k in kinds}, lower, measure)


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    found |= {"device": jax.devices()[0].device_kind, "platform": jax.devices()[0].client.platform_version}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return found | {"driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()}
    except (OSError, subprocess.CalledProcessError):
        return found | {"driver": "unknown"}


def main(argv: list[str] | None = None) -> int:
    """Prints as it goes, and writes JSON. Returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("mosaic", "xla"), default="mosaic")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to check this script")
    parser.add_argument("--out", type=Path, help="JSON to write; without it the committed one, unless --small")
    args = parser.parse_args(argv)
    out = args.out or (None if args.small else RESULTS)
    started = time.perf_counter()
    peaks = measure_peaks(args.small)
    print(f"copy {peaks.bandwidth / 1e9:.0f} GB/s, product {peaks.flops / 1e12:.0f} TFLOP/s", flush=True)
    found = {"date": datetime.date.today().isoformat()} | versions()
    found |= {"copy GB/s": peaks.bandwidth / 1e9, "product TFLOP/s": peaks.flops / 1e12, "acceptance": ACCEPTANCE}
    lines = attention(args.small, args.backend, peaks) + append(args.small, args.backend) + generation(args.small)
    found |= {"seconds": time.perf_counter() - started, "lines": lines}
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n")
    wrong, missed = (sum(map(test, lines)) for test in (lambda x: "wrong" in x, lambda x: not x.get("met", True)))
    print(f"{wrong} wrong, {missed} targets missed, {found['seconds']:.0f} seconds")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
