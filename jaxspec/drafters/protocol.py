"""What a drafter is: a pair of functions around a state of its own."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from flax import struct
from jaxtyping import Array, Float, Int

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


@struct.dataclass
class Verified:
    """What verification (or prefill) leaves for the drafter. Column j stands at position `start + j`.

    Attributes:
        start: position of the first column.
        next_tokens: the token after each position.
        hidden: the trunk's state at each position, after its final norm.
        length: how many columns are verified; the others hold nothing of use.
        page_ids: pages of each row, by position.
        window: slot of every position the drafter may write, from `start` on: at least t + k - 1 columns.
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
        """The state before the first prefill."""

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

        Args:
            params: the target's parameters, the drafter's among them.
            config: the architecture.
            rule: draws the drafts.
            verified: the positions verified since the last call, all of which enter the drafter's cache.
            count: drafts wanted per row, 0..num_drafts.
            num_drafts: K, static.
            sampling: the rows' parameters.
            cache: the pools.
            state: the drafter's own.

        Raises:
            ValueError: at trace time, when `verified.window` has too few columns for K drafts.
        """
