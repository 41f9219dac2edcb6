"""Trains the bundled checkpoint from text that every Python has at hand: its own standard library.

    uv run --group train python checkpoints/train.py

Stopped early, the same command goes on from the last saved step. `--export-only` writes the model of that step
meanwhile.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from card import plot_losses, render_card
from corpus import END_OF_TEXT, Corpus, encode, fit_tokenizer, read_corpus, schedule_windows
from fast_forward import losses
from flax import struct
from jaxtyping import Array, Float, Int
from orbax.checkpoint import v1 as ocp
from tokenizers import Tokenizer
from tqdm import tqdm

from jaxspec.checkpoint.writer import save_hf
from jaxspec.config import ModelConfig, RopeConfig
from jaxspec.models.params import Params, count_params, init_params

HERE = Path(__file__).parent
PEAK_RATE = 2e-3
MTP_WEIGHT = 0.3
BIAS_SPEED = 1e-3
SAVE_EVERY = 250
PROBE_BATCHES = 8


@struct.dataclass
class TrainState:
    """All that a step changes."""

    step: Int[Array, ""]
    params: Params
    moments: optax.OptState


def model_config() -> ModelConfig:
    """The bundled model: 8 layers, 8.3 M parameters, every feature of DeepSeek-V3's layers at small widths."""
    return ModelConfig(
        model_type="deepseek_v3",
        vocab_size=2048,
        hidden_size=256,
        num_layers=8,
        num_heads=4,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        intermediate_size=704,
        moe_intermediate_size=64,
        n_routed_experts=8,
        n_shared_experts=6,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        attention_bias=False,
        num_mtp_layers=1,
        initializer_range=0.02,
        eos_token_ids=(0,),
    )


def stable_steps(steps: int) -> int:
    """Steps before the learning rate falls."""
    return int(0.65 * steps)


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """AdamW; norms and the router's bias do not decay.

    The rate warms up, stays, and falls to zero over the last steps: unlike under a cosine, a run can be prolonged
    until the fall begins.
    """
    warmup, stable = max(1, min(200, steps // 10)), stable_steps(steps)
    phases = [
        optax.linear_schedule(0.0, PEAK_RATE, warmup),
        optax.constant_schedule(PEAK_RATE),
        optax.cosine_decay_schedule(PEAK_RATE, max(1, steps - stable)),
    ]
    rate = optax.join_schedules(phases, [warmup, stable])

    def decays(params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not any(word in jax.tree_util.keystr(path) for word in ("norm", "bias")), params
        )

    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.97, weight_decay=0.1, mask=decays)
    )


def balance(params: Params, load: Float[Array, "layers experts"]) -> Params:
    """Raises the bias of experts chosen less than the mean, without a loss (arXiv:2408.15664)."""
    raise_by = BIAS_SPEED * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
    trunk, mtp = jnp.split(raise_by, [params.moe.attn_norm.shape[0]])

    def add(mlp: struct.PyTreeNode, change: Float[Array, "layers experts"]) -> struct.PyTreeNode:
        return mlp.replace(router_bias=mlp.router_bias + change)

    moe = params.moe.replace(mlp=add(params.moe.mlp, trunk))
    layer = params.mtp.layer.replace(mlp=add(params.mtp.layer.mlp, mtp))
    return params.replace(moe=moe, mtp=params.mtp.replace(layer=layer))


def make_step(config: ModelConfig, optimizer: optax.GradientTransformation) -> Callable:
    """The jitted update: (state, tokens) -> (state, loss, MTP loss)."""

    def objective(params: Params, tokens: Int[Array, "b t+2"]) -> tuple[Array, tuple[Array, Array, Array]]:
        main, mtp, load = losses(params, config, tokens)
        return main + MTP_WEIGHT * mtp, (main, mtp, load)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, tokens: Int[Array, "b t+2"]) -> tuple[TrainState, Array, Array]:
        gradients, (main, mtp, load) = jax.grad(objective, has_aux=True)(state.params, tokens)
        updates, moments = optimizer.update(gradients, state.moments, state.params)
        params = balance(optax.apply_updates(state.params, updates), load)
        return TrainState(step=state.step + 1, params=params, moments=moments), main, mtp

    return step


def prepare(corpus: Corpus, config: ModelConfig, run_dir: Path) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Tokenizer and tokens of the library and of the tests. The tokenizer knows the library alone."""
    path = run_dir / "tokenizer.json"
    if not path.exists():
        fit_tokenizer(corpus.library.values(), config.vocab_size).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    if not corpus.tests:
        print("This Python comes without its tests: training on the library alone.")
    return tokenizer, encode(tokenizer, corpus.library.values()), encode(tokenizer, corpus.tests.values())


def fresh_state(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first step."""
    params = init_params(config, jax.random.key(seed))
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, moments=optimizer.init(params))


def restore(saver: ocp.training.Checkpointer, state: TrainState) -> TrainState:
    """The last saved state, or the one given where nothing was saved."""
    if saver.latest is None:
        return state
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    return saver.load(saver.latest.step, abstract)


def train(args: argparse.Namespace, config: ModelConfig, saver: ocp.training.Checkpointer) -> None:
    """Runs the remaining steps, saving and logging as it goes."""
    corpus = read_corpus()
    tokenizer, library, tests = prepare(corpus, config, args.run_dir)
    tokens = np.concatenate([library, tests])
    width, end = args.seq_len + 2, tokenizer.token_to_id(END_OF_TEXT)
    starts = schedule_windows(len(library), len(tests), args.steps * args.batch, width, args.seed)
    held_out = np.concatenate([[end], encode(tokenizer, corpus.held_out.values())])
    probe_starts = np.linspace(0, len(held_out) - width, PROBE_BATCHES * args.batch, dtype=int)
    probe = held_out[probe_starts[:, None] + np.arange(width)].astype(np.int32)
    optimizer = make_optimizer(args.steps)
    step, measure = make_step(config, optimizer), jax.jit(lambda p, t: losses(p, config, t)[:2])
    state = restore(saver, fresh_state(config, optimizer, args.seed))
    log = Log(args, len(library), len(tests), sum(len(t.encode()) for t in corpus.held_out.values()) / len(held_out))
    for i in tqdm(range(int(state.step), args.steps), initial=int(state.step), total=args.steps, mininterval=5):
        rows = starts[i * args.batch : (i + 1) * args.batch]
        batch = tokens[rows[:, None] + np.arange(width)].astype(np.int32)
        state, *train_losses = step(state, batch)
        if (i + 1) % SAVE_EVERY == 0 or i + 1 == args.steps:
            measured = [measure(state.params, part) for part in np.split(probe, PROBE_BATCHES)]
            log.write(i + 1, train_losses, np.mean(np.asarray(measured), axis=0))
            saver.save(i + 1, state)


class Log:
    """The run's record, one JSON line a measurement."""

    def __init__(self, args: argparse.Namespace, library_tokens: int, test_tokens: int, bytes_per_token: float):
        self.path = args.run_dir / "log.jsonl"
        self.tokens_per_step, self.bytes_per_token = args.batch * args.seq_len, bytes_per_token
        self.started = time.monotonic() - (read_log(self.path) or [{"seconds": 0}])[-1]["seconds"]
        facts = {
            "command": " ".join(["python checkpoints/train.py", *sys.argv[1:]]),
            "python": platform.python_version(),
            "jax": jax.__version__,
            "steps": args.steps,
            "batch": args.batch,
            "seq_len": args.seq_len,
            "library_tokens": library_tokens,
            "test_tokens": test_tokens,
        }
        (args.run_dir / "training.json").write_text(json.dumps(facts, indent=2) + "\n")

    def write(self, step: int, train_losses: list[Array], held_out: Float[np.ndarray, "2"]) -> None:
        """Appends one measurement."""
        line = {
            "step": step,
            "tokens": step * self.tokens_per_step,
            "seconds": round(time.monotonic() - self.started, 1),
            "loss": round(float(train_losses[0]), 4),
            "mtp_loss": round(float(train_losses[1]), 4),
            "held_out": round(float(held_out[0]), 4),
            "held_out_mtp": round(float(held_out[1]), 4),
            "bits_per_byte": round(float(held_out[0]) / self.bytes_per_token / np.log(2), 4),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        tqdm.write(json.dumps(line))


def read_log(path: Path) -> list[dict[str, float]]:
    """The record so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def export(args: argparse.Namespace, config: ModelConfig, params: Params, step: int) -> None:
    """Writes the Hugging Face folder, its card and its loss curve."""
    out = args.out
    save_hf(out, config, params)
    Tokenizer.from_file(str(args.run_dir / "tokenizer.json")).save(str(out / "tokenizer.json"))
    special = {"eos_token": END_OF_TEXT, "bos_token": None, "model_max_length": config.max_position_embeddings}
    special |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (out / "tokenizer_config.json").write_text(json.dumps(special, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}, indent=2) + "\n")
    log = [line for line in read_log(args.run_dir / "log.jsonl") if line["step"] <= step]
    facts = json.loads((args.run_dir / "training.json").read_text())
    facts |= {"parameters": count_params(params), "trained_steps": step, "log": log}
    (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / "evaluation.json").unlink(missing_ok=True)  # of the weights that were here before
    plot_losses(out)
    render_card(out)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8000, help="optimiser steps in all")
    parser.add_argument("--batch", type=int, default=8, help="windows a step")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens a window")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "stdlib-9m", help="folder of the exported model")
    parser.add_argument("--run-dir", type=Path, default=HERE.parent / ".runs/stdlib-9m", help="folder to resume from")
    parser.add_argument("--export-only", action="store_true", help="export the last saved step, train nothing")
    return parser.parse_args()


def main() -> None:
    """Trains, then exports."""
    args, config = parse_args(), model_config()
    args.run_dir.mkdir(parents=True, exist_ok=True)
    latest = ocp.training.preservation_policies.LatestN(2)
    with ocp.training.Checkpointer(args.run_dir.resolve() / "steps", preservation_policy=latest) as saver:
        if not args.export_only:
            train(args, config, saver)
        state = restore(saver, fresh_state(config, make_optimizer(args.steps), args.seed))
    export(args, config, state.params, int(state.step))


def restart_tuned() -> None:
    """Starts this program again with allocator settings read at process start.

    XLA's CPU backend allocates and frees large buffers every step; huge pages that malloc keeps are 20% faster
    than mapping fresh ones each time (glibc; elsewhere the variables mean nothing).
    """
    tuned = {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
        "MALLOC_TOP_PAD_": str(1 << 28),
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
    }
    if any(os.environ.get(name) != value for name, value in tuned.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | tuned)


if __name__ == "__main__":
    restart_tuned()
    main()
