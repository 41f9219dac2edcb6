"""One round: verify the drafts, accept a prefix of them, draft again. And prefill, which is a round's first half
over a prompt: both commit tokens and draft the next ones by the same functions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import capacity as ledger_ops
from jaxspec.cache.page_table import slots_of
from jaxspec.config import ModelConfig, SpeculativeConfig
from jaxspec.decoding.state import DecodeState, Finish, RoundInfo, pages_per_row
from jaxspec.drafters import DRAFTERS, Drafts, Verified
from jaxspec.models.params import Params
from jaxspec.models.primitives import apply_head
from jaxspec.models.transformer import Placement, forward
from jaxspec.sampling.acceptance import ACCEPTANCE_RULES, Verdict, sample, stop_and_limit
from jaxspec.sampling.logits import log_probs


def decode_round(
    params: Params,
    config: ModelConfig,
    spec: SpeculativeConfig,
    state: DecodeState,
    num_drafts: int | None = None,
) -> tuple[DecodeState, RoundInfo]:
    """Advances every running row by its accepted drafts and one token.

    With K = 0 of a speculation that drafts, the drafter stays warm and proposes nothing, so that acceptance is back
    as soon as K is. With `spec.num_speculative_tokens` = 0, drafting is off for good: the drafter does not run.

    Args:
        params: the parameters.
        config: the architecture (static).
        spec: the speculation (static).
        state: the rows, with room for at least as many drafts.
        num_drafts: K (static): drafts verified at most, and drafted for the next round. It may differ from round to
            round, if it never depends on drafted tokens. None: `spec.num_speculative_tokens`, which is the most.

    Returns:
        The rows, and what happened. A row that found no pages is unchanged; a finished one has returned its own,
        unless the state keeps them.

    Raises:
        ValueError: at trace time, when K is out of range or the table is too narrow for what a round may reach.
    """
    num_drafts = spec.num_speculative_tokens if num_drafts is None else num_drafts
    _check_num_drafts(spec, state, num_drafts)
    check_table_width(state)
    state, rows = _grant(state, state.running, num_drafts)
    window = _window(state, jnp.where(rows, state.kv_len, 0), rows, ledger_ops.growth(num_drafts))

    drafts = state.drafts.first(num_drafts, rows)
    state, hidden, verdict, healthy = _verify(params, config, spec, state, drafts, window, rows)
    state, info = _commit(state, verdict, rows, healthy)
    start, draft_window = state.kv_len - info.num_tokens, window[:, : max(2 * num_drafts, 1)]
    verified = Verified(start, verdict.tokens, hidden, info.num_tokens, state.table.page_ids, draft_window)
    state = _draft(params, config, spec, state, verified, rows, num_drafts)
    state = _settle(state, rows, verdict.num_accepted, num_drafts)
    accepted = jnp.where(rows, verdict.num_accepted, 0)
    return state, info.replace(num_drafts=drafts.count, num_accepted=accepted, stalled=state.running & ~rows)


def prefill(
    params: Params,
    config: ModelConfig,
    spec: SpeculativeConfig,
    state: DecodeState,
    prompts: Int[Array, "b t"],
    lengths: Int[Array, "b"],
    limits: Int[Array, "b"],
) -> tuple[DecodeState, RoundInfo]:
    """Caches whole prompts in empty rows, draws the first token of each and drafts the next ones.

    Args:
        params: the parameters.
        config: the architecture (static).
        spec: the speculation (static).
        state: the rows.
        prompts: token ids, padded on the right with any valid id.
        lengths: prompt lengths; 0 leaves a row empty.
        limits: tokens each row may commit at most, prompt included.

    Returns:
        The rows, and the first tokens. A row whose prompt found no pages has finished with an error.

    Raises:
        ValueError: at trace time, when the table is too narrow.
    """
    wanted = lengths > 0
    state = state.replace(
        kv_len=jnp.where(wanted, 0, state.kv_len),
        limit=jnp.where(wanted, limits, state.limit),
        finish=jnp.where(wanted, Finish.PREFILLING, state.finish),
    )
    whole = jnp.ones_like(wanted)
    state, info = prefill_chunk(params, config, spec, state, prompts, lengths, jnp.zeros_like(lengths), whole)
    state = state.replace(finish=jnp.where(state.prefilling, Finish.ERROR, state.finish))
    return state, info.replace(stalled=jnp.zeros_like(wanted), finish=state.finish)


def prefill_chunk(
    params: Params,
    config: ModelConfig,
    spec: SpeculativeConfig,
    state: DecodeState,
    tokens: Int[Array, "b t"],
    length: Int[Array, "b"],
    following: Int[Array, "b"],
    is_last: Bool[Array, "b"],
) -> tuple[DecodeState, RoundInfo]:
    """Caches the next tokens of prompts. Where a prompt ends, draws the first token and drafts the next ones.

    Args:
        params: the parameters.
        config: the architecture (static).
        spec: the speculation (static).
        state: the rows, some of them prefilling.
        tokens: what stands at the positions from kv_len on, padded on the right with any valid id.
        length: how many of them count; 0 leaves a row alone.
        following: the prompt's token after the chunk, which the drafter's cache needs; any id where `is_last`.
        is_last: the prompt ends with the chunk.

    Returns:
        The rows, and the first tokens. A row that found no pages is unchanged, and stalled.

    Raises:
        ValueError: at trace time, when the table is too narrow.
    """
    num_drafts = spec.num_speculative_tokens
    _check_num_drafts(spec, state, num_drafts)
    check_table_width(state)
    width, wanted, start = tokens.shape[1], length > 0, jnp.where(length > 0, state.kv_len, 0)
    room = jnp.where(wanted, start + length, 0)
    (capacity, table), ok = ledger_ops.reserve((state.capacity, state.table), room, width)
    rows = wanted & ok
    ends, length = rows & is_last, jnp.where(rows, length, 0)
    # The draft stage writes beyond the prompt: its room is granted like a round's, and goes back unverified.
    state, may_draft = _grant(state.replace(capacity=capacity, table=table), ends, num_drafts)
    window = _window(state, start, rows, width + max(num_drafts - 1, 0))

    hidden, cache = forward(params, config, tokens, state.cache, Placement(table.page_ids, start, length, window))
    each, last = jnp.arange(length.shape[0]), jnp.maximum(length - 1, 0)
    logits = apply_head(params, hidden[each, last])[:, None]
    first = sample(log_probs(logits, state.sampling), state.sampling, (start + length)[:, None])
    healthy = jnp.all(jnp.isfinite(logits), axis=(1, 2)) | ~ends
    cached = state.replace(
        cache=cache,
        kv_len=jnp.where(rows, start + length - ends, state.kv_len),
        finish=jnp.where(ends, Finish.RUNNING, state.finish),
    )
    state, info = _commit(cached, Verdict(first, jnp.zeros_like(length)), ends, healthy)

    following = jnp.where(is_last, first[:, 0], following)
    next_tokens = jnp.roll(tokens, -1, axis=1).at[each, last].set(following)
    verified = Verified(start, next_tokens, hidden, length, state.table.page_ids, window)
    state = _draft(params, config, spec, state, verified, may_draft, num_drafts)
    ledger = ledger_ops.revert((state.capacity, state.table), ends, num_drafts)
    state = _release_finished(state.replace(capacity=ledger[0], table=ledger[1]))
    return state, info.replace(stalled=wanted & ~rows)


def _check_num_drafts(spec: SpeculativeConfig, state: DecodeState, num_drafts: int) -> None:
    most = spec.num_speculative_tokens
    if most > state.num_drafts:
        raise ValueError(f"num_speculative_tokens: got {most}, expected at most the {state.num_drafts} of the state")
    if not 0 <= num_drafts <= most:
        raise ValueError(f"num_drafts: got {num_drafts}, expected 0..{most}, at most num_speculative_tokens")


def check_table_width(state: DecodeState) -> None:
    """Over-reach is a shape error: a full row's last round reaches 2K positions beyond `max_model_len`."""
    got, page_size = state.table.page_ids.shape[1], state.table.page_size
    expected = pages_per_row(state.max_model_len, state.num_drafts, page_size)
    if got < expected:
        raise ValueError(
            f"the page table has {got} columns of {page_size} tokens; max_model_len {state.max_model_len} with "
            f"{state.num_drafts} drafts needs {expected}: ceil((max_model_len + 2 * drafts) / page_size)"
        )


def _grant(state: DecodeState, rows: Bool[Array, "b"], num_drafts: int) -> tuple[DecodeState, Bool[Array, "b"]]:
    (capacity, table), ok = ledger_ops.grant((state.capacity, state.table), rows, num_drafts)
    return state.replace(capacity=capacity, table=table), ok


def _window(state: DecodeState, start: Int[Array, "b"], rows: Bool[Array, "b"], width: int) -> Int[Array, "b w"]:
    """Slots of the positions from `start` on: the only ones this step may write. Scratch for other rows."""
    positions = start[:, None] + jnp.arange(width)[None]
    return slots_of(state.table, positions, jnp.broadcast_to(rows[:, None], positions.shape))


def _verify(
    params: Params,
    config: ModelConfig,
    spec: SpeculativeConfig,
    state: DecodeState,
    drafts: Drafts,
    window: Int[Array, "b w"],
    rows: Bool[Array, "b"],
) -> tuple[DecodeState, Float[Array, "b t hidden"], Verdict, Bool[Array, "b"]]:
    """Runs the trunk over the last token and the drafts, and judges them.

    Returns:
        The state, the trunk's states, the verdict, and which rows have finite logits wherever they count.
    """
    tokens, count = jnp.concatenate([state.last_token[:, None], drafts.tokens], axis=1), drafts.count
    column = jnp.arange(tokens.shape[1])[None]
    counts = column <= count[:, None]
    start = jnp.where(rows, state.kv_len, 0)  # a row that sits out costs no attention
    placement = Placement(state.table.page_ids, start, jnp.where(rows, count + 1, 0), window)
    hidden, cache = forward(params, config, tokens, state.cache, placement)
    logits = apply_head(params, hidden)
    healthy = jnp.all(jnp.isfinite(logits) | ~counts[:, :, None], axis=(1, 2))
    rule = ACCEPTANCE_RULES[spec.verification]
    positions = start[:, None] + 1 + column
    log_p = log_probs(logits, state.sampling)
    verdict = rule.verify(log_p, drafts.tokens, count, drafts.proposal, state.sampling, positions)
    return state.replace(cache=cache), hidden, verdict, healthy


def _commit(
    state: DecodeState, verdict: Verdict, rows: Bool[Array, "b"], healthy: Bool[Array, "b"]
) -> tuple[DecodeState, RoundInfo]:
    """Appends the emitted tokens one by one in effect: a stop token ends the output, then the limit does."""
    emitted = jnp.where(rows & healthy, verdict.num_accepted + 1, 0)
    room = state.limit - state.kv_len - 1
    num_tokens, stopped, at_limit = stop_and_limit(verdict.tokens, emitted, state.sampling.stop_ids, room)
    ended = jnp.where(stopped, Finish.STOP, jnp.where(at_limit, Finish.LENGTH, Finish.RUNNING))
    ended = jnp.where(healthy, ended, Finish.ERROR)
    newest = verdict.tokens[jnp.arange(rows.shape[0]), jnp.maximum(num_tokens - 1, 0)]
    state = state.replace(
        last_token=jnp.where(num_tokens > 0, newest, state.last_token),
        kv_len=state.kv_len + num_tokens,
        finish=jnp.where(rows, ended, state.finish),
    )
    nothing = jnp.zeros_like(num_tokens)
    return state, RoundInfo(verdict.tokens, num_tokens, nothing, nothing, jnp.zeros_like(rows), state.finish)


def _draft(
    params: Params,
    config: ModelConfig,
    spec: SpeculativeConfig,
    state: DecodeState,
    verified: Verified,
    rows: Bool[Array, "b"],
    num_drafts: int,
) -> DecodeState:
    """Proposes up to K tokens for each of `rows`: as many as it wants, but never one that could not be committed."""
    if spec.num_speculative_tokens == 0:  # The drafter no longer runs, so what it proposed earlier is not kept.
        return state.replace(drafts=state.drafts.replace(count=jnp.zeros_like(state.drafts.count)))
    room = state.limit - state.kv_len - 1
    wanted = jnp.minimum(room - 1, state.sampling.max_drafts)
    count = jnp.where(rows & state.running, jnp.clip(wanted, 0, num_drafts), 0)
    rule, drafter = ACCEPTANCE_RULES[spec.verification], DRAFTERS[spec.method]
    drafts, cache, memory = drafter.draft(
        params, config, rule, verified, count, num_drafts, state.sampling, state.cache, state.drafter
    )
    # Rows that stood still keep what they had.
    keep = verified.length == 0
    drafts, memory = jax.tree.map(
        lambda new, old: jnp.where(keep.reshape(-1, *(1,) * (new.ndim - 1)), old, new),
        (drafts.widen(state.num_drafts), memory),
        (state.drafts, state.drafter),
    )
    return state.replace(cache=cache, drafts=drafts, drafter=memory)


def _settle(
    state: DecodeState, rows: Bool[Array, "b"], num_accepted: Int[Array, "b"], num_drafts: int
) -> DecodeState:
    ledger = (state.capacity, state.table)
    ledger = ledger_ops.settle(ledger, rows, num_accepted, state.kv_len + 1, num_drafts)
    return _release_finished(state.replace(capacity=ledger[0], table=ledger[1]))


def _release_finished(state: DecodeState) -> DecodeState:
    """Pages of finished rows go back at once, unless somebody wants to publish them first."""
    if state.keeps_pages:
        return state
    done = (state.capacity.capacity > 0) & ~state.running & ~state.prefilling
    ledger = (state.capacity, state.table)
    capacity, table = jax.lax.cond(jnp.any(done), lambda: ledger_ops.release(ledger, done), lambda: ledger)
    return state.replace(capacity=capacity, table=table)
