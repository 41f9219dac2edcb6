"""Everything a batch of rows carries from round to round, and what a round reports."""

from __future__ import annotations

import enum
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from jaxspec.cache import Capacity, KVCache, PageTable
from jaxspec.config import ModelConfig, SpeculativeConfig
from jaxspec.drafters import DRAFTERS, Drafts
from jaxspec.sampling.acceptance import ACCEPTANCE_RULES, Proposal
from jaxspec.sampling.params import SamplingState


class Finish(enum.IntEnum):
    """Why a row is not running."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3  # non-finite logits, or no room for the prompt
    EMPTY = 4  # the row holds no request
    PREFILLING = 5  # the row's prompt is not cached in full yet


@struct.dataclass
class DecodeState:
    """The state of b rows. Between rounds, a row has kv_len + 1 committed tokens and capacity for kv_len.

    (While it is prefilling, kv_len tokens of its prompt are cached, and no token is committed.)

    Attributes:
        cache: the pools.
        table: the pages of each row.
        capacity: the ledger.
        last_token: the newest committed token, not cached yet; it stands at position kv_len.
        kv_len: cached tokens, the one length that everything else is derived from.
        limit: tokens the row may commit at most, prompt included.
        drafts: proposals for positions kv_len + 1 on, in K_max columns.
        drafter: the drafter's own state.
        finish: a `Finish` value.
        sampling: the sampling parameters.
        max_model_len: tokens a row may hold, prompt and output; no `limit` exceeds it.
        keeps_pages: finished rows hold their pages until somebody takes them.
    """

    cache: KVCache
    table: PageTable
    capacity: Capacity
    last_token: Int[Array, "b"]
    kv_len: Int[Array, "b"]
    limit: Int[Array, "b"]
    drafts: Drafts
    drafter: Any
    finish: Int[Array, "b"]
    sampling: SamplingState
    max_model_len: int = struct.field(pytree_node=False)
    keeps_pages: bool = struct.field(pytree_node=False, default=False)

    @property
    def num_drafts(self) -> int:
        """K_max, static: drafts there is room for. A round may use fewer."""
        return self.drafts.tokens.shape[1]

    @property
    def running(self) -> Bool[Array, "b"]:
        """Rows that still decode."""
        return self.finish == Finish.RUNNING

    @property
    def prefilling(self) -> Bool[Array, "b"]:
        """Rows whose prompt is not cached in full."""
        return self.finish == Finish.PREFILLING


@struct.dataclass
class RoundInfo:
    """What one round did, per row; or several, on a leading axis.

    Attributes:
        tokens: the committed tokens, in the first `num_tokens` of the round's 1 + K columns.
        num_tokens: how many were committed.
        num_drafts: drafts that were verified.
        num_accepted: drafts that were accepted.
        stalled: the row wanted to run and found no pages.
        finish: a `Finish` value, after the round.
    """

    tokens: Int[Array, "*r b t"]
    num_tokens: Int[Array, "*r b"]
    num_drafts: Int[Array, "*r b"]
    num_accepted: Int[Array, "*r b"]
    stalled: Bool[Array, "*r b"]
    finish: Int[Array, "*r b"]


def pages_per_row(max_model_len: int, num_drafts: int, page_size: int) -> int:
    """Table columns that hold a full row and the 2K positions a round may reach beyond it."""
    return -(-(max_model_len + 2 * num_drafts) // page_size)


def init_state(
    config: ModelConfig,
    spec: SpeculativeConfig,
    cache: KVCache,
    sampling: SamplingState,
    max_model_len: int,
) -> DecodeState:
    """Empty rows over the pools of `cache`, all of whose pages are free.

    Args:
        config: the architecture.
        spec: the speculation.
        cache: pools of any content.
        sampling: parameters of every row; their number is the number of rows.
        max_model_len: tokens a row may hold, prompt and output.

    Raises:
        ValueError: `max_model_len` is beyond what the model's sparse attention allows here.
    """
    config.check_context("max_model_len", max_model_len)
    rows, num_drafts = sampling.temperature.shape[0], spec.num_speculative_tokens
    width = ACCEPTANCE_RULES[spec.verification].proposal_width(config.vocab_size)
    shape = (rows, num_drafts)
    # An array of its own for every field: a caller may donate the state.
    last_token, kv_len, limit, count, finish = (jnp.zeros(rows, jnp.int32) for _ in range(5))
    _, num_pages, page_size, _ = cache.latent.shape
    drafts = Drafts(
        tokens=jnp.zeros(shape, jnp.int32),
        count=count,
        proposal=Proposal(jnp.zeros((*shape, width), jnp.int32), jnp.zeros((*shape, width), jnp.float32)),
    )
    return DecodeState(
        cache=cache,
        table=PageTable.create(rows, pages_per_row(max_model_len, num_drafts, page_size), num_pages, page_size),
        capacity=Capacity.create(rows),
        last_token=last_token,
        kv_len=kv_len,
        limit=limit,
        drafts=drafts,
        drafter=DRAFTERS[spec.method].init_state(config, rows, num_drafts, cache.activations),
        finish=finish + Finish.EMPTY,
        sampling=sampling,
        max_model_len=max_model_len,
    )
