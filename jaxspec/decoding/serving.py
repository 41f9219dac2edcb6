"""Rows that requests come to and leave: what a continuously batching engine keeps on the device, and its transitions.

Rounds go on with the rows that decode, chunks with the oldest prompts. Which rows these are, and how far each is, the
device knows; the host may run behind it, and what it does not know yet can only make it wait.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from jaxspec.cache import capacity as ledger_ops
from jaxspec.cache import prefix as prefix_ops
from jaxspec.cache.kv_cache import copy_page
from jaxspec.cache.page_table import slots_of
from jaxspec.cache.prefix import PublishedPages
from jaxspec.config import ModelConfig, SpeculativeConfig
from jaxspec.decoding.round import decode_round, prefill_chunk
from jaxspec.decoding.state import DecodeState, Finish, RoundInfo
from jaxspec.models.params import Params
from jaxspec.sampling.params import SamplingState

_LAST = jnp.iinfo(jnp.int32).max


@struct.dataclass
class Serving:
    """Rows, and the prompts that some of them have yet to cache.

    Attributes:
        state: the rows.
        prompts: the tokens that a row starts from; what is beyond `prompt_len` is not looked at.
        prompt_len: how many those are.
        order: rows with a lower number were admitted earlier.
        published: pages that outlive their rows.
    """

    state: DecodeState
    prompts: Int[Array, "b l"]
    prompt_len: Int[Array, "b"]
    order: Int[Array, "b"]
    published: PublishedPages

    @classmethod
    def create(cls, state: DecodeState) -> Serving:
        """No requests yet. There may be a handle for every page."""
        rows, num_pages = state.kv_len.shape[0], state.table.free_ids.shape[0]
        prompt_len, order = (jnp.zeros(rows, jnp.int32) for _ in range(2))
        prompts = jnp.zeros((rows, state.max_model_len), jnp.int32)
        published = PublishedPages.create(num_pages)
        return cls(state.replace(keeps_pages=True), prompts, prompt_len, order, published)


@struct.dataclass
class StepInfo:
    """What r rounds did, or one chunk of prompts, which counts as a round: prompts that end give their first token.

    Attributes:
        rounds: of every round.
        kv_len: tokens cached afterwards, per row.
        num_pages: pages held afterwards, per row.
    """

    rounds: RoundInfo
    kv_len: Int[Array, "b"]
    num_pages: Int[Array, "b"]


def serve_rounds(
    params: Params,
    config: ModelConfig,
    spec: SpeculativeConfig,
    serving: Serving,
    num_rows: int,
    num_rounds: int,
    num_drafts: int,
) -> tuple[Serving, StepInfo]:
    """Rounds for the rows that decode; fewer when no row does any more.

    Args:
        params: the parameters.
        config: the architecture (static).
        spec: the speculation (static).
        serving: the rows.
        num_rows: a bound on how many decode (static): no more are computed.
        num_rounds: how many rounds (static).
        num_drafts: K of these rounds (static).

    Raises:
        ValueError: at trace time, when K is out of range or the table is too narrow.
    """

    def one_round(state: DecodeState) -> tuple[DecodeState, RoundInfo]:
        return decode_round(params, config, spec, state, num_drafts)

    def none_left(state: DecodeState) -> tuple[DecodeState, RoundInfo]:
        zeros, no = jnp.zeros(num_rows, jnp.int32), jnp.zeros(num_rows, bool)
        tokens = jnp.zeros((num_rows, 1 + num_drafts), jnp.int32)
        return state, RoundInfo(tokens, zeros, zeros, zeros, no, state.finish)

    def step(state: DecodeState, _: None) -> tuple[DecodeState, RoundInfo]:
        return jax.lax.cond(jnp.any(state.running), one_round, none_left, state)

    rows = jnp.argsort(~serving.state.running)[:num_rows]
    part = _take_rows(serving.state, rows)
    if num_rounds == 1:  # A loop of one costs more than none.
        part, info = one_round(part)
        return _report(serving, part, rows, jax.tree.map(lambda x: x[None], info))
    part, rounds = jax.lax.scan(step, part, None, length=num_rounds)
    return _report(serving, part, rows, rounds)


def serve_prompts(
    params: Params, config: ModelConfig, spec: SpeculativeConfig, serving: Serving, num_rows: int, width: int
) -> tuple[Serving, StepInfo]:
    """The next `width` tokens of the `num_rows` oldest prompts (both static).

    Their rows are taken out of the batch for it and put back.

    Raises:
        ValueError: at trace time, when the table is too narrow.
    """
    state = serving.state
    rows = jnp.argsort(jnp.where(state.prefilling, serving.order, _LAST))[:num_rows]
    part = _take_rows(state, rows)
    prompt_len = serving.prompt_len[rows]
    length = jnp.where(part.prefilling, jnp.clip(prompt_len - part.kv_len, 0, width), 0)
    places = jnp.minimum(part.kv_len[:, None] + jnp.arange(width + 1)[None], serving.prompts.shape[1] - 1)
    tokens = serving.prompts[rows[:, None], places]
    following = tokens[jnp.arange(num_rows), length]
    is_last = part.kv_len + length >= prompt_len
    part, info = prefill_chunk(params, config, spec, part, tokens[:, :-1], length, following, is_last)
    return _report(serving, part, rows, jax.tree.map(lambda x: x[None], info))


def admit(
    serving: Serving,
    prompt: Int[Array, "l"],
    row: Int[Array, ""],
    prompt_len: Int[Array, ""],
    limit: Int[Array, ""],
    order: Int[Array, ""],
    num_cached: Int[Array, ""],
    handles: Int[Array, "m"],
    sampling: SamplingState,
) -> Serving:
    """Gives a free row a prompt, of which the next chunks cache what published pages do not hold already.

    Args:
        serving: the rows.
        prompt: tokens, padded with any valid id.
        row: which row; it holds no pages.
        prompt_len: how many count.
        limit: tokens the row may commit at most, prompt included.
        order: its place among the prompts.
        num_cached: prompt tokens that the published pages hold, fewer than `prompt_len`; see `prefix.adopt`.
        handles: of these pages.
        sampling: parameters of one row.
    """
    state = serving.state
    ledger, kv_len, source, target = prefix_ops.adopt(
        (state.capacity, state.table), serving.published, row, handles, num_cached
    )
    # What the row before it left behind is not to be seen: no draft of it, and nothing of its drafter.
    drafts, drafter = jax.tree.map(lambda x: x.at[row].set(jnp.zeros_like(x[0])), (state.drafts, state.drafter))
    state = state.replace(
        cache=copy_page(state.cache, source, target),
        capacity=ledger[0],
        table=ledger[1],
        kv_len=state.kv_len.at[row].set(kv_len),
        limit=state.limit.at[row].set(limit),
        finish=state.finish.at[row].set(Finish.PREFILLING),
        drafts=drafts,
        drafter=drafter,
        sampling=jax.tree.map(lambda x, new: x.at[row].set(new[0]), state.sampling, sampling),
    )
    return serving.replace(
        state=state,
        prompts=serving.prompts.at[row].set(prompt),
        prompt_len=serving.prompt_len.at[row].set(prompt_len),
        order=serving.order.at[row].set(order),
    )


def vacate(serving: Serving, rows: Bool[Array, "b"]) -> Serving:
    """Ends rows, whatever they are at, and takes their pages back."""
    state = serving.state
    capacity, table = ledger_ops.release((state.capacity, state.table), rows)
    finish = jnp.where(rows, Finish.EMPTY, state.finish)
    return serving.replace(state=state.replace(capacity=capacity, table=table, finish=finish))


def publish_pages(serving: Serving, row: Int[Array, ""], handles: Int[Array, "m"]) -> Serving:
    """See `prefix.publish`."""
    table, published = prefix_ops.publish(serving.state.table, serving.published, row, handles)
    return serving.replace(state=serving.state.replace(table=table), published=published)


def withdraw_pages(serving: Serving, which: Bool[Array, "h"]) -> Serving:
    """See `prefix.withdraw`."""
    table, published = prefix_ops.withdraw(serving.state.table, serving.published, which)
    return serving.replace(state=serving.state.replace(table=table), published=published)


def serving_faults(serving: Serving) -> dict[str, Bool[Array, ""]]:
    """Broken laws of the ledger between steps, each True where it is broken, the slots of the next round included."""
    state = serving.state
    ledger, cached = (state.capacity, state.table), jnp.where(state.finish == Finish.EMPTY, 0, state.kv_len)
    faults = ledger_ops.ledger_faults(ledger, cached, prefix_ops.held_pages(state.table, serving.published))
    return faults | {"a round would write to a slot that is not its row's alone": _writes_astray(state)}


def _writes_astray(state: DecodeState) -> Bool[Array, ""]:
    """Grants what the next round would be granted, and looks at every slot of its window."""
    width = ledger_ops.growth(state.num_drafts)
    (_, table), rows = ledger_ops.grant((state.capacity, state.table), state.running, state.num_drafts)
    positions = state.kv_len[:, None] + jnp.arange(width)[None]
    mine = jnp.broadcast_to(rows[:, None], positions.shape)
    slots = slots_of(table, positions, mine)
    pages = slots // table.page_size
    uses = jnp.zeros(table.free_ids.shape[0] * table.page_size, jnp.int32).at[slots].add(mine.astype(jnp.int32))
    alone = (pages > 0) & (table.num_refs[pages] == 1) & (uses[slots] == 1)
    return jnp.any(mine & ~alone)


def _report(
    serving: Serving, part: DecodeState, rows: Int[Array, "r"], rounds: RoundInfo
) -> tuple[Serving, StepInfo]:
    """Puts rows back, and spreads what they report over all of them."""
    state = _put_rows(serving.state, part, rows)
    num_rows = state.kv_len.shape[0]

    def spread(x: Array) -> Array:
        return jnp.zeros((x.shape[0], num_rows, *x.shape[2:]), x.dtype).at[:, rows].set(x)

    rounds = jax.tree.map(spread, rounds)
    rounds = rounds.replace(finish=jnp.broadcast_to(state.finish, rounds.finish.shape))
    return serving.replace(state=state), StepInfo(rounds, state.kv_len, state.table.num_pages)


def _of_rows(state: DecodeState) -> dict:
    """Whatever in a state has a first axis of rows."""
    table = state.table
    names = ("capacity", "last_token", "kv_len", "limit", "drafts", "drafter", "finish", "sampling")
    return {name: getattr(state, name) for name in names} | {"table": (table.page_ids, table.num_pages)}


def _take_rows(state: DecodeState, rows: Int[Array, "r"]) -> DecodeState:
    """A state of some rows over the same pools and free pages."""
    taken = jax.tree.map(lambda x: x[rows], _of_rows(state))
    page_ids, num_pages = taken.pop("table")
    return state.replace(table=state.table.replace(page_ids=page_ids, num_pages=num_pages), **taken)


def _put_rows(state: DecodeState, part: DecodeState, rows: Int[Array, "r"]) -> DecodeState:
    """The state with some of its rows as they have become."""
    put = jax.tree.map(lambda x, new: x.at[rows].set(new), _of_rows(state), _of_rows(part))
    page_ids, num_pages = put.pop("table")
    return part.replace(table=part.table.replace(page_ids=page_ids, num_pages=num_pages), **put)
