"""Batch generation as one jitted program: prefill, then a `lax.while_loop` over rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from jaxspec.config import ModelConfig, SpeculativeConfig
from jaxspec.decoding.round import decode_round, prefill
from jaxspec.decoding.state import DecodeState, RoundInfo
from jaxspec.models.params import Params


@struct.dataclass
class Generation:
    """Output and counts of b rows.

    Attributes:
        tokens: generated tokens, in the first `num_tokens` columns of each row.
        num_tokens: how many there are.
        finish: a `Finish` value; RUNNING where no pages were left for any row to go on.
        num_rounds: verifications of the row that had at least one draft ("drafts" in vLLM's metrics).
        num_draft_tokens: drafts verified.
        accepted_at: how often the draft at each place was accepted.
    """

    tokens: Int[Array, "b n"]
    num_tokens: Int[Array, "b"]
    finish: Int[Array, "b"]
    num_rounds: Int[Array, "b"]
    num_draft_tokens: Int[Array, "b"]
    accepted_at: Int[Array, "b k"]

    @classmethod
    def empty(cls, state: DecodeState, max_new_tokens: int) -> Generation:
        """Nothing generated yet, with room for `max_new_tokens` a row."""
        rows, num_drafts = state.drafts.tokens.shape
        zeros = jnp.zeros(rows, jnp.int32)
        return cls(
            tokens=jnp.zeros((rows, max_new_tokens), jnp.int32),
            num_tokens=zeros,
            finish=state.finish,
            num_rounds=zeros,
            num_draft_tokens=zeros,
            accepted_at=jnp.zeros((rows, num_drafts), jnp.int32),
        )

    def add(self, info: RoundInfo) -> Generation:
        """Appends what a round committed."""
        column, place = jnp.arange(info.tokens.shape[1])[None], jnp.arange(self.accepted_at.shape[1])[None]
        room = self.tokens.shape[1]
        target = jnp.where(column < info.num_tokens[:, None], self.num_tokens[:, None] + column, room)
        rows = jnp.arange(self.tokens.shape[0])[:, None]
        return self.replace(
            tokens=self.tokens.at[rows, target].set(info.tokens, mode="drop"),
            num_tokens=self.num_tokens + info.num_tokens,
            finish=info.finish,
            num_rounds=self.num_rounds + (info.num_drafts > 0),
            num_draft_tokens=self.num_draft_tokens + info.num_drafts,
            accepted_at=self.accepted_at + (place < info.num_accepted[:, None]),
        )


def generate(
    params: Params,
    config: ModelConfig,
    spec: SpeculativeConfig,
    state: DecodeState,
    prompts: Int[Array, "b t"],
    lengths: Int[Array, "b"],
    limits: Int[Array, "b"],
    max_new_tokens: int,
) -> tuple[DecodeState, Generation]:
    """Generates until every row has stopped or reached its limit. Meant to be jitted whole.

    Args:
        params: the parameters.
        config: the architecture (static).
        spec: the speculation (static).
        state: empty rows.
        prompts: token ids, padded on the right with any valid id.
        lengths: prompt lengths; 0 leaves a row empty.
        limits: tokens each row may commit at most, prompt included; at most `max_new_tokens` beyond the prompt.
        max_new_tokens: columns of the output (static).

    Returns:
        The rows, whose pages are all free again unless some could not go on, and the output.
    """
    state, info = prefill(params, config, spec, state, prompts, lengths, limits)
    return continue_generation(params, config, spec, state, Generation.empty(state, max_new_tokens).add(info))


def continue_generation(
    params: Params, config: ModelConfig, spec: SpeculativeConfig, state: DecodeState, generation: Generation
) -> tuple[DecodeState, Generation]:
    """Rounds until no row is running. If every running row lacks pages the loop ends: none can ever come free."""

    def may_go_on(carry: tuple) -> Array:
        state, _, some_row_ran = carry
        return some_row_ran & jnp.any(state.running)

    def one_round(carry: tuple) -> tuple:
        before, generation, _ = carry
        state, info = decode_round(params, config, spec, before)
        return state, generation.add(info), jnp.any(before.running & ~info.stalled)

    state, generation, _ = jax.lax.while_loop(may_go_on, one_round, (state, generation, jnp.bool_(True)))
    return state, generation
