"""Drafts from the checkpoint's multi-token-prediction modules.

Module 0 joins the trunk's state at a position with the token after it and predicts the token after that. Later
modules go on from the module below with one token more each; when more drafts are wanted than there are modules,
the last one is fed its own state again (an approximation that costs acceptance, never exactness; DeepSeek-V3
report section 2.2 and vLLM's `spec_step_idx`, which starts over at module 0 where there are several).

Every module keeps the pair of (state, token t) at the position before t. So after a verification, whatever the
module, the verified positions are rewritten from the trunk's own states and the drafts' pairs lie right behind them.

When fewer drafts are wanted than there are modules in use, the modules left over run over the verified positions
alone and propose nothing. That keeps them warm: their caches have no holes once more drafts are wanted again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.kv_cache import KVCache
from jaxspec.config import ModelConfig
from jaxspec.drafters.protocol import Drafts, Verified
from jaxspec.models.params import Params
from jaxspec.models.primitives import apply_head
from jaxspec.models.transformer import Placement, mtp_forward
from jaxspec.sampling.acceptance import AcceptanceRule, Proposal
from jaxspec.sampling.params import SamplingState


class MTPDrafter:
    """See the module's text. Its state: for every module but the last, its output at the last verified position."""

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError when the model has no MTP module."""
        if not config.num_mtp_layers:
            raise ValueError(
                "speculative method 'mtp' needs a model with multi-token-prediction modules; "
                "got num_nextn_predict_layers = 0. Use num_speculative_tokens=0 to decode without drafts"
            )

    def init_state(self, config: ModelConfig, num_rows: int, num_drafts: int, dtype: Any) -> Array:
        """Zeros; the prefill fills them."""
        return jnp.zeros((num_rows, max(_chain_length(config, num_drafts) - 1, 0), config.hidden_size), dtype)

    def draft(
        self,
        params: Params,
        config: ModelConfig,
        rule: AcceptanceRule,
        verified: Verified,
        count: Int[Array, "b"],
        num_drafts: int,
        sampling: SamplingState,
        cache: KVCache,
        state: Float[Array, "b d hidden"],
    ) -> tuple[Drafts, KVCache, Float[Array, "b d hidden"]]:
        """See `Drafter.draft`."""
        width = verified.next_tokens.shape[1]
        _check_window(verified.window.shape[1], width, num_drafts)
        run = _Run(params, config, rule, verified, count, sampling)
        tokens, hidden = verified.next_tokens, verified.hidden
        # From the state, not from this call's K: every module in use stays warm.
        chain = state.shape[1] + 1
        boundaries, drawn = [], []
        for module in range(chain):
            proposes = module < max(num_drafts, 1)  # at K = 0 the one draft is cut off below, and never computed
            if module:
                hidden = jnp.concatenate([state[:, module - 1, None], hidden], axis=1)
            if module and proposes:
                tokens = _put(tokens, verified.length + module - 1, drawn[-1][0])
            columns = width + module if proposes else width
            hidden, cache = run.over_verified(module, tokens[:, :columns], hidden[:, :columns], cache)
            boundaries.append(_take(hidden, verified.length - 1))
            if proposes:
                last = _take(hidden, verified.length + module - 1)
                drawn.append(run.propose(module, module, last))

        def recycle(carry: tuple, step: Array) -> tuple:
            last, token, cache = carry
            last, cache = run.at_draft(chain - 1, step, token, last, cache)
            new = run.propose(chain - 1, step, last)
            return (last, new[0], cache), new

        steps = jnp.arange(chain, num_drafts)
        (_, _, cache), recycled = jax.lax.scan(recycle, (last, drawn[-1][0], cache), steps)
        chained = [jnp.stack(parts, axis=1) for parts in zip(*drawn, strict=True)]
        recycled = [jnp.swapaxes(parts, 0, 1) for parts in recycled]
        parts = (jnp.concatenate(both, axis=1) for both in zip(chained, recycled, strict=True))
        tokens, ids, probs = (part[:, :num_drafts] for part in parts)
        return Drafts(tokens, count, Proposal(ids, probs)), cache, jnp.stack(boundaries, axis=1)[:, : chain - 1]


@dataclasses.dataclass(frozen=True)
class _Run:
    """What stays the same over the modules and steps of one call."""

    params: Params
    config: ModelConfig
    rule: AcceptanceRule
    verified: Verified
    count: Int[Array, "b"]
    sampling: SamplingState

    def over_verified(
        self, module: int, tokens: Int[Array, "b t"], hidden: Float[Array, "b t hidden"], cache: KVCache
    ) -> tuple[Float[Array, "b t hidden"], KVCache]:
        """A module over every verified position and over the drafts in further columns: module d takes in d."""
        further = tokens.shape[1] - self.verified.next_tokens.shape[1]
        kept = self.verified.length + jnp.clip(self.count - 1, 0, further)
        placement = Placement(self.verified.page_ids, self.verified.start, kept, self.verified.window)
        return mtp_forward(self.params, self.config, module, tokens, hidden, cache, placement)

    def at_draft(
        self,
        module: int,
        step: Int[Array, ""],
        token: Int[Array, "b"],
        below: Float[Array, "b hidden"],
        cache: KVCache,
    ) -> tuple[Float[Array, "b hidden"], KVCache]:
        """The last module at the one position before draft `step - 1`."""
        column = self.verified.length - 1 + step
        wanted = (step < self.count).astype(jnp.int32)
        slot = _take(self.verified.window, column)[:, None]
        placement = Placement(self.verified.page_ids, self.verified.start + column, wanted, slot)
        hidden, cache = mtp_forward(
            self.params, self.config, module, token[:, None], below[:, None], cache, placement
        )
        return hidden[:, 0], cache

    def propose(self, module: int, step: int | Int[Array, ""], last: Float[Array, "b hidden"]) -> tuple:
        """Draws draft `step` from the module's state before it: tokens, and their `Proposal` columns."""
        head = self.params.mtp.head
        logits = apply_head(self.params, last, None if head is None else head[module])
        position = self.verified.start + self.verified.length + 1 + step
        return self.rule.propose(logits, self.sampling, position)


def _check_window(got: int, width: int, num_drafts: int) -> None:
    expected = width + max(num_drafts - 1, 0)
    if got < expected:
        raise ValueError(
            f"{num_drafts} drafts after {width} verified positions write {expected} slots; got a window of {got}"
        )


def _chain_length(config: ModelConfig, num_drafts: int) -> int:
    return min(config.num_mtp_layers, num_drafts)


def _take(x: Array, column: Int[Array, "b"]) -> Array:
    """x[b, column[b]]; a column below 0, of a row with nothing verified, reads column 0."""
    return x[jnp.arange(x.shape[0]), jnp.maximum(column, 0)]


def _put(tokens: Int[Array, "b t"], column: Int[Array, "b"], new: Int[Array, "b"]) -> Int[Array, "b u"]:
    """One column wider, with `new` at `column` of each row."""
    wider = jnp.pad(tokens, ((0, 0), (0, 1)))
    return wider.at[jnp.arange(tokens.shape[0]), jnp.maximum(column, 0)].set(new)
