"""Drives the pure functions round by round, and the slow, cache-free answers to compare with."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import KVCache, SamplingParams, SamplingState, SpeculativeConfig, dense_forward, init_state
from jaxspec.cache.capacity import ledger_faults
from jaxspec.decoding import DecodeState, Finish, RoundInfo, decode_round, generate, prefill
from jaxspec.decoding.state import pages_per_row

ROUND = jax.jit(decode_round, static_argnames=("config", "spec", "num_drafts"))
PREFILL = jax.jit(prefill, static_argnames=("config", "spec"))
GENERATE = jax.jit(generate, static_argnames=("config", "spec", "max_new_tokens"))
DENSE = jax.jit(dense_forward, static_argnames="config")
FAULTS = jax.jit(ledger_faults)
GREEDY = SamplingParams(temperature=0.0)
PROMPT_WIDTH = 24


@dataclasses.dataclass
class Run:
    """What a batch gave."""

    state: DecodeState
    tokens: list[list[int]]
    finish: list[str]
    rounds: list[RoundInfo]

    @property
    def drafted(self) -> int:
        return sum(int(info.num_drafts.sum()) for info in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(int(info.num_accepted.sum()) for info in self.rounds)


def spec_of(num_drafts: int, verification: str = "coupled") -> SpeculativeConfig:
    return SpeculativeConfig(num_speculative_tokens=num_drafts, verification=verification)


def new_state(
    config,
    spec: SpeculativeConfig,
    params: Sequence[SamplingParams],
    *,
    max_model_len: int = 64,
    page_size: int = 4,
    num_pages: int | None = None,
    stop_ids: Sequence[int] = (),
    fill: float = 0.0,
) -> DecodeState:
    per_row = pages_per_row(max_model_len, spec.num_speculative_tokens, page_size)
    num_pages = len(params) * per_row + 1 if num_pages is None else num_pages
    cache = KVCache.create(config, num_pages, page_size, jnp.float32)
    cache = jax.tree.map(lambda pool: jnp.full_like(pool, fill), cache)
    sampling = SamplingState.stack([(p, p.seed or 0, tuple(stop_ids)) for p in params], 2)
    return init_state(config, spec, cache, sampling, max_model_len)


def pad(prompts: Sequence[Sequence[int]], width: int = PROMPT_WIDTH):
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(padded), jnp.asarray([len(p) for p in prompts], jnp.int32)


def broken_laws(state: DecodeState) -> list[str]:
    """Names of the broken laws of table and ledger. Rows at rest have capacity for exactly kv_len."""
    held = jnp.where(state.running, state.kv_len, 0)
    return [law for law, broken in FAULTS((state.capacity, state.table), held).items() if bool(broken)]


def check_laws(state: DecodeState) -> None:
    laws = broken_laws(state)
    if laws:
        raise AssertionError(f"broken: {laws}")


def step_through(
    model,
    prompts: Sequence[Sequence[int]],
    num_new: int | Sequence[int],
    spec: SpeculativeConfig,
    *,
    params: Sequence[SamplingParams] | None = None,
    between: Callable[[DecodeState], DecodeState] = lambda state: state,
    draft_lengths: Sequence[int] | None = None,
    max_rounds: int = 400,
    prompt_width: int = PROMPT_WIDTH,
    **state_options,
) -> Run:
    """Prefill and rounds one at a time from the host, every law checked after each.

    `between` may change the state before each step: poison pages, say. `draft_lengths` are the rounds' K, over and
    over; without them every round takes the speculation's.
    """
    _, config, weights = model
    params = params or [GREEDY] * len(prompts)
    state = between(new_state(config, spec, params, **state_options))
    padded, lengths = pad(prompts, prompt_width)
    limits = jnp.minimum(lengths + jnp.asarray(num_new, jnp.int32), state.max_model_len)
    state, info = PREFILL(weights, config, spec, state, padded, lengths, limits)
    rounds = [info]
    lengths_of_rounds = itertools.cycle([()] if draft_lengths is None else [(k,) for k in draft_lengths])
    while bool(state.running.any()) and len(rounds) < max_rounds:
        check_laws(state)
        state, info = ROUND(weights, config, spec, between(state), *next(lengths_of_rounds))
        rounds.append(info)
        if bool(info.stalled.all() & state.running.all()):
            break
    check_laws(state)
    tokens = [[] for _ in prompts]
    for info in rounds:
        for row, (new, count) in enumerate(zip(info.tokens.tolist(), info.num_tokens.tolist(), strict=True)):
            tokens[row] += new[:count]
    return Run(state, tokens, [Finish(f).name.lower() for f in state.finish.tolist()], rounds)


def run_loop(
    model, prompts, num_new: int, spec, *, params=None, **state_options
) -> tuple[DecodeState, list[list[int]]]:
    """The same as one program: `generate`."""
    _, config, weights = model
    state = new_state(config, spec, params or [GREEDY] * len(prompts), **state_options)
    padded, lengths = pad(prompts)
    limits = jnp.minimum(lengths + num_new, state.max_model_len)
    state, out = GENERATE(weights, config, spec, state, padded, lengths, limits, num_new)
    return state, [out.tokens[row, :n].tolist() for row, n in enumerate(out.num_tokens.tolist())]


def dense_greedy(model, prompt: Sequence[int], num_new: int) -> list[int]:
    """Greedy tokens of the cache-free model, one whole pass for each."""
    _, config, weights = model
    tokens = list(prompt)
    for _ in range(num_new):
        padded = jnp.asarray([tokens + [0] * (64 - len(tokens))], jnp.int32)
        tokens.append(int(jnp.argmax(DENSE(weights, config, padded).logits[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


def poison(state: DecodeState) -> DecodeState:
    """NaN in scratch, in every page no row owns, and in the slots of owned pages that hold no verified token."""
    return state.replace(cache=jax.tree.map(functools.partial(_poison_pool, state=state), state.cache))


def _poison_pool(pool, state):
    pages, page_size = pool.shape[1:3]
    keep = np.zeros((pages, page_size), bool)
    for ids, kv_len in zip(np.asarray(state.table.page_ids), state.kv_len.tolist(), strict=True):
        for position in range(kv_len):
            keep[ids[position // page_size], position % page_size] = True
    keep[0] = False
    return jnp.where(keep[None, :, :, None], pool, jnp.nan)


def shuffle_free_pages(state: DecodeState, seed: int = 0) -> DecodeState:
    """The same free pages in another order."""
    order = np.random.default_rng(seed).permutation(int(state.table.num_free))
    free = state.table.free_ids.at[: len(order)].set(state.table.free_ids[order])
    return state.replace(table=state.table.replace(free_ids=free))


def cached(state: DecodeState, row: int, upto: int) -> np.ndarray:
    """Latents and rotated keys [layers, upto, c + r] of a row's first positions."""
    pages = np.asarray(state.table.page_ids)[row]
    size = state.table.page_size
    at = [(pages[p // size], p % size) for p in range(upto)]
    page, slot = np.array([a for a, _ in at]), np.array([b for _, b in at])
    return np.concatenate([np.asarray(pool)[:, page, slot] for pool in (state.cache.latent, state.cache.rope)], -1)
