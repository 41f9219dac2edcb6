"""Bytes a second and peak memory of loading an FP8 checkpoint, beside safetensors with torch in one run.

    uv run --group dev python benchmarks/loading.py [--gigabytes 6]

The checkpoint is made for the run: matrices of DeepSeek-V3's sizes, a few layers, shards of 1 GB. Every load has a
process of its own and they take turns; figures are medians. The files come from the page cache: the disk is not
measured. safetensors maps FP8, of which every page is then touched, or copies it to memory of its own; jaxspec reads
it, transposes it and stacks layers and experts. In bfloat16 both compute, and torch neither transposes nor stacks.
Ratios are to torch, copied for FP8.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from safetensors import safe_open

from jaxspec.checkpoint import load
from jaxspec.checkpoint.reader import open_checkpoint
from jaxspec.config import ModelConfig
from jaxspec.models.params import param_specs

RESULTS = Path(__file__).parent / "results" / "loading.json"
BLOCK, SHARD_BYTES, LAYERS = 128, 10**9, 4
NAMES = {"uint8": "F8_E4M3", "bfloat16": "BF16", "float32": "F32"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind's medians. Memory is in bytes, and does not count what the imports take."""

    kind: str
    megabytes_per_second: float
    ratio: float
    peak: int
    arrays: int
    peak_ratio: float
    shards_over_arrays: float


def config_of(gigabytes: float) -> dict:
    """config.json of a model with as many experts as fill this."""
    hidden, ffn = 7168, 2048
    experts = max(round(gigabytes * 1e9 / ((LAYERS - 1) * 3 * hidden * ffn)), 1)
    return {
        "model_type": "deepseek_v3",
        "vocab_size": 1024,
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": ffn,
        "moe_intermediate_size": ffn,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
    }


def write_checkpoint(folder: Path, gigabytes: float) -> None:
    """Writes random weights by shards, matrices in FP8."""
    config = config_of(gigabytes)
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    shapes = {
        name: (weight.hf_shape, weight.dtype)
        for weight in jax.tree.leaves(param_specs(ModelConfig.from_hf(config)))
        for _, name in weight.tensors()
    }
    rng, weight_map, shard = np.random.default_rng(0), {}, {}
    for name, (shape, dtype) in shapes.items():
        shard |= _random_tensors(rng, name, shape, dtype)
        if sum(x.nbytes for x in shard.values()) >= SHARD_BYTES or name == next(reversed(shapes)):
            file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            _write_shard(folder / file, shard)
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _random_tensors(rng: np.random.Generator, name: str, shape: tuple, dtype: object) -> dict[str, np.ndarray]:
    if len(shape) < 2 or dtype is not None or "embed" in name or "head" in name:
        return {name: rng.standard_normal(shape, np.float32).astype(dtype or ml_dtypes.bfloat16)}
    # Without the highest exponent there is no NaN.
    codes = np.frombuffer(rng.bytes(math.prod(shape)), np.uint8).reshape(shape) & 0xF7
    grid = tuple(-(-size // BLOCK) for size in shape)
    return {name: codes, f"{name}_scale_inv": rng.uniform(0.5, 2, grid).astype(np.float32)}


def _write_shard(file: Path, tensors: dict[str, np.ndarray]) -> None:
    header, end = {}, 0
    for name, x in tensors.items():
        begin, end = end, end + x.nbytes
        header[name] = {"dtype": NAMES[x.dtype.name], "shape": x.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            opened.write(x.tobytes())


def with_jaxspec(folder: Path, weight_format: str) -> int:
    """Loads, and gives the bytes of the arrays."""
    _, params = load(folder, weight_format=weight_format, use_tqdm=False)
    return sum(x.nbytes for x in jax.tree.leaves(jax.block_until_ready(params)))


def with_torch(folder: Path, *, copy: bool = False, dequantize: bool = False) -> int:
    """Loads all tensors, in FP8 mapped or copied, or multiplied out, and gives their bytes."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            part = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if dequantize:
            part = {name: _dequantized(name, part) for name in part if not name.endswith("_scale_inv")}
        if copy:
            part = {name: x.clone() for name, x in part.items()}
        for x in part.values():
            x.view(torch.uint8).reshape(-1)[::4096].sum()
        tensors |= part
    return sum(x.nbytes for x in tensors.values())


def _dequantized(name: str, part: dict[str, torch.Tensor]) -> torch.Tensor:
    scales, x = part.get(f"{name}_scale_inv"), part[name]
    if scales is None:
        return x
    of_rows = scales.repeat_interleave(BLOCK, 0)[: x.shape[0]]
    return (x.float() * of_rows.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]).to(torch.bfloat16)


WAYS: dict[str, Callable[[Path], int]] = {
    "torch, FP8 mapped": with_torch,
    "torch, FP8": lambda folder: with_torch(folder, copy=True),
    "jaxspec, FP8": lambda folder: with_jaxspec(folder, "fp8"),
    "torch, bfloat16": lambda folder: with_torch(folder, dequantize=True),
    "jaxspec, bfloat16": lambda folder: with_jaxspec(folder, "dequantized"),
}


def measure_here(kind: str, folder: Path) -> dict[str, float]:
    """One load in this process: seconds, bytes of the arrays, and peak memory over that before it."""
    jax.block_until_ready(jnp.zeros(1))
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    started = time.perf_counter()
    arrays = WAYS[kind](folder)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {"seconds": seconds, "arrays": arrays, "peak": peak}


def measure(folder: Path, turns: int) -> list[Row]:
    """All kinds in turns, each load in a process of its own."""
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in WAYS}
    for _ in range(turns):
        for kind in WAYS:
            command = [sys.executable, __file__, "--load", kind, str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs[kind].append(json.loads(done.stdout.splitlines()[-1]))
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    peers = {kind: kind.replace("jaxspec", "torch").removesuffix(" mapped") for kind in WAYS}
    return [_row(kind, runs[kind], runs[peers[kind]], stored) for kind in WAYS]


def _row(kind: str, runs: list[dict], torch_runs: list[dict], stored: int) -> Row:
    def ratio(key: str) -> float:
        return statistics.median(a[key] / b[key] for a, b in zip(runs, torch_runs, strict=True))

    peak, arrays = (int(statistics.median(run[key] for run in runs)) for key in ("peak", "arrays"))
    speed = statistics.median(stored / 1e6 / run["seconds"] for run in runs)
    return Row(kind, speed, 1 / ratio("seconds"), peak, arrays, ratio("peak"), (peak - arrays) / SHARD_BYTES)


def as_table(rows: list[Row]) -> str:
    """Markdown."""
    heads = ("", "MB/s", "to torch", "peak, GB", "to torch", "arrays, GB", "over the arrays, shards")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        speeds = f"{row.megabytes_per_second:.0f} | {row.ratio:.2f}"
        memory = (
            f"{row.peak / 1e9:.2f} | {row.peak_ratio:.2f} | {row.arrays / 1e9:.2f} | {row.shards_over_arrays:.2f}"
        )
        lines.append(f"| {row.kind} | {speeds} | {memory} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=6.0, help="of the checkpoint; in bfloat16 twice that")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(measure_here(args.load[0], Path(args.load[1]))))
        return
    folder = Path(tempfile.mkdtemp(prefix="jaxspec-loading-"))
    try:
        write_checkpoint(folder, args.gigabytes)
        started = time.perf_counter()
        open_checkpoint(folder)
        opening = time.perf_counter() - started
        rows = measure(folder, args.turns)
    finally:
        shutil.rmtree(folder)
    setting = (
        f"{args.gigabytes:g} GB in shards of 1 GB, from the page cache, medians of {args.turns} turns; checked in "
        f"{opening:.1f} s; jax {jax.__version__}, torch {torch.__version__}, {os.cpu_count()} cores, "
        f"{platform.machine()}."
    )
    print(as_table(rows), setting, sep="\n")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"setting": setting, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
