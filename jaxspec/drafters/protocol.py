"""What a drafter is: a pair of functions around a state of its own.

A drafter is *warm* when its cache and its state know every verified position. Only then are its next drafts as good
as if it had drafted all along, so a call that wants no drafts keeps it warm all the same.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.kv_cache import KVCache
from jaxspec.config import ModelConfig
from jaxspec.models.params import Params
from jaxspec.sampling.acceptance import AcceptanceRule, Proposal
from jaxspec.sampling.params import SamplingState


@struct.dataclass
class Drafts:
    """Tokens proposed for the next round.

    Attributes:
        tokens: token j is proposed for position kv_len + 1 + j.
        count: how many of them count; the rest is never looked at. 0 is a value.
        proposal: the distributions they were drawn from, for the rule that needs them.
    """

    tokens: Int[Array, "b k"]
    count: Int[Array, "b"]
    proposal: Proposal

    def first(self, num_drafts: int, rows: Bool[Array, "b"]) -> Drafts:
        """The first K of `rows` and none of others, K columns wide.

        Both rules stay exact when drafts are cut off, as long as K is chosen without a look at their tokens.
        """
        tokens, proposal = jax.tree.map(lambda x: x[:, :num_drafts], (self.tokens, self.proposal))
        return Drafts(tokens, jnp.where(rows, jnp.minimum(self.count, num_drafts), 0), proposal)

    def widen(self, num_drafts: int) -> Drafts:
        """The same drafts in `num_drafts` columns."""
        more = num_drafts - self.tokens.shape[1]
        tokens, proposal = jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2))), (self.tokens, self.proposal)
        )
        return Drafts(tokens, self.count, proposal)


@struct.dataclass
class Verified:
    """What verification (or prefill) leaves for the drafter. Column j stands at position `start + j`.

    Attributes:
        start: position of the first column.
        next_tokens: the token after each position.
        hidden: the trunk's state at each position, after its final norm.
        length: how many columns are verified; the others hold nothing of use.
        page_ids: pages of each row, by position.
        window: slot of every position the drafter may write, from `start` on: at least t + max(k - 1, 0) columns.
    """

    start: Int[Array, "b"]
    next_tokens: Int[Array, "b t"]
    hidden: Float[Array, "b t hidden"]
    length: Int[Array, "b"]
    page_ids: Int[Array, "b m"]
    window: Int[Array, "b w"]


@runtime_checkable
class Drafter(Protocol):
    """Proposes drafts. Implementations are stateless; what they remember is a pytree in the decode state."""

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError when the model cannot be drafted for."""

    def init_state(self, config: ModelConfig, num_rows: int, num_drafts: int, dtype: Any) -> Any:
        """The state before the first prefill; no call of `draft` will want more than `num_drafts`."""

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
        state: Any,
    ) -> tuple[Drafts, KVCache, Any]:
        """Proposes the tokens after `start + length`.

        Whatever K, all that `init_state` provides for stays warm: a later call with another K drafts as well as if
        K had been that one before.

        Args:
            params: the target's parameters, the drafter's among them.
            config: the architecture.
            rule: draws the drafts.
            verified: the positions verified since the last call, all of which enter the drafter's cache.
            count: drafts wanted per row, 0..num_drafts.
            num_drafts: K of this call, static, at most that of `init_state`. 0 proposes nothing and keeps warm.
            sampling: the rows' parameters.
            cache: the pools.
            state: the drafter's own.

        Returns:
            The drafts, K columns wide; the pools; and the drafter's state.

        Raises:
            ValueError: at trace time, when `verified.window` has too few columns for K drafts.
        """
