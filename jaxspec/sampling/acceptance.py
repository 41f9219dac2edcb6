"""Drawing tokens, the two exact acceptance rules, and where a run of accepted tokens ends.

B rows, K drafts, T = K + 1 target positions, V tokens, C entries of a stored draft distribution. A position is
the index, in its sequence, of the token being drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxspec.sampling.logits import argmax, log_probs
from jaxspec.sampling.params import SamplingState
from jaxspec.sampling.random import Purpose, gumbel, row_keys, uniform


@struct.dataclass
class Proposal:
    """The distribution q each draft was drawn from, exactly as sampled, sparse.

    Attributes:
        ids: the tokens q may give. Ids with probability 0 may be anything in range, repeats included.
        probs: their probabilities; a draft that was not drawn at random is a row [1, 0, 0, ...] on its id.
    """

    ids: Int32[Array, "b k c"]
    probs: Float32[Array, "b k c"]


@struct.dataclass
class Verdict:
    """What verification decided.

    Attributes:
        tokens: the accepted drafts, then the target's own token. Later entries are valid ids without meaning.
        num_accepted: how many drafts were accepted, so that `num_accepted + 1` tokens are emitted.
    """

    tokens: Int32[Array, "b t"]
    num_accepted: Int32[Array, "b"]


@runtime_checkable
class AcceptanceRule(Protocol):
    """Draws drafts and verifies them so that the output has exactly the target's distribution."""

    def proposal_width(self, vocab: int) -> int:
        """C: how many entries of q are kept per draft; 0 where the rule needs none."""

    def propose(
        self, logits: Float[Array, "b v"], sampling: SamplingState, positions: Int32[Array, "b"]
    ) -> tuple[Int32[Array, "b"], Int32[Array, "b c"], Float32[Array, "b c"]]:
        """Draws a draft per row from the drafter's logits under the row's sampling parameters.

        Returns:
            The drafts, and their `Proposal` columns: ids and probs.
        """

    def verify(
        self,
        log_p: Float32[Array, "b t v"],
        drafts: Int32[Array, "b k"],
        count: Int32[Array, "b"],
        proposal: Proposal,
        sampling: SamplingState,
        positions: Int32[Array, "b t"],
    ) -> Verdict:
        """Accepts a prefix of the drafts and adds one token of the target's own.

        Args:
            log_p: `log_probs` of the target at the last token and at each draft, T = K + 1.
            drafts: the drafts offered; `log_p[:, j]` judges `drafts[:, j]`. K may be 0.
            count: drafts that count per row, 0..K; later ones are ignored, whatever they hold.
            proposal: what `propose` returned for each draft, stacked.
            sampling: the rows' parameters.
            positions: where the token drawn from `log_p[:, j]` goes.
        """


def sample(
    log_p: Float32[Array, "b t v"], sampling: SamplingState, positions: Int32[Array, "b t"]
) -> Int32[Array, "b t"]:
    """Draws the target's token at each position: argmax(log_p + gumbel), a categorical draw (Gumbel-max).

    Greedy rows are one-hot and need no noise; none is generated when all rows are.
    """
    return _draw(log_p, sampling, positions, Purpose.SAMPLE)


def _draw(
    log_p: Float32[Array, "b t v"], sampling: SamplingState, positions: Int32[Array, "b t"], purpose: Purpose
) -> Int32[Array, "b t"]:
    def with_noise() -> Int32[Array, "b t"]:
        keys = row_keys(sampling.seed, positions, purpose)
        return argmax(log_p + gumbel(keys, log_p.shape[-1]))

    return jax.lax.cond(jnp.all(sampling.is_greedy), lambda: argmax(log_p), with_noise)


@dataclasses.dataclass(frozen=True)
class Coupled:
    """Draft and target share their noise: a draft is accepted when it is the token the target draws.

    Both draw argmax(log prob + gumbel) with the same noise at the same position, so a drafter that is close to
    the target mostly draws the same token (Gumbel coupling: Daliri, Musco and Suresh 2024, arXiv:2408.07978).
    Emitted tokens are always the target's, whatever was drafted: the output is a function of model, prompt,
    parameters and seed alone.
    """

    def proposal_width(self, vocab: int) -> int:
        """0: the drafts' distribution is not needed."""
        return 0

    def propose(
        self, logits: Float[Array, "b v"], sampling: SamplingState, positions: Int32[Array, "b"]
    ) -> tuple[Int32[Array, "b"], Int32[Array, "b c"], Float32[Array, "b c"]]:
        """See `AcceptanceRule.propose`."""
        log_q = log_probs(logits[:, None], sampling)
        tokens = sample(log_q, sampling, positions[:, None])[:, 0]
        rows = logits.shape[0]
        return tokens, jnp.zeros((rows, 0), jnp.int32), jnp.zeros((rows, 0), jnp.float32)

    def verify(
        self,
        log_p: Float32[Array, "b t v"],
        drafts: Int32[Array, "b k"],
        count: Int32[Array, "b"],
        proposal: Proposal,
        sampling: SamplingState,
        positions: Int32[Array, "b t"],
    ) -> Verdict:
        """See `AcceptanceRule.verify`."""
        tokens = sample(log_p, sampling, positions)
        return Verdict(tokens, _accepted_prefix(tokens[:, :-1] == drafts, count))


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Rejection sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

    A draft d is accepted with probability min(1, p(d) / q(d)). The token after the accepted ones comes from
    max(p - q, 0), normalised, if a draft was rejected there, else from p.

    A proposal is the `max_width` most likely tokens of the drafter, renormalised. That truncation is q itself,
    not an approximation of it: it costs acceptance, never exactness.
    """

    max_width: int = 64

    def proposal_width(self, vocab: int) -> int:
        """The whole vocabulary, or `max_width` tokens of it."""
        return min(vocab, self.max_width)

    def propose(
        self, logits: Float[Array, "b v"], sampling: SamplingState, positions: Int32[Array, "b"]
    ) -> tuple[Int32[Array, "b"], Int32[Array, "b c"], Float32[Array, "b c"]]:
        """See `AcceptanceRule.propose`."""
        log_q = log_probs(logits[:, None], sampling)[:, 0]
        log_q, ids = _most_likely(log_q, self.proposal_width(logits.shape[-1]), sampling)
        chosen = _draw(log_q[:, None], sampling, positions[:, None], Purpose.DRAFT)
        return jnp.take_along_axis(ids, chosen, axis=1)[:, 0], ids, jnp.exp(log_q)

    def verify(
        self,
        log_p: Float32[Array, "b t v"],
        drafts: Int32[Array, "b k"],
        count: Int32[Array, "b"],
        proposal: Proposal,
        sampling: SamplingState,
        positions: Int32[Array, "b t"],
    ) -> Verdict:
        """See `AcceptanceRule.verify`.

        The final token uses SAMPLE noise, rejected or not: one is drawn per round, at a position where none was
        drawn before, and the drafts and their tests used other purposes.
        """
        num_drafts = drafts.shape[1]
        accept = _passes_test(log_p[:, :num_drafts], drafts, proposal, sampling, positions[:, :num_drafts])
        num_accepted = _accepted_prefix(accept, count)
        final = num_accepted[:, None]
        log_final = jnp.take_along_axis(log_p, final[:, :, None], axis=1)
        if num_drafts:
            log_final = _subtract_rejected(log_final, num_accepted, count, proposal)
        token = sample(log_final, sampling, jnp.take_along_axis(positions, final, axis=1))
        kept = jnp.where(jnp.arange(num_drafts)[None] < final, drafts, token)
        return Verdict(jnp.concatenate([kept, token], axis=1), num_accepted)


def _most_likely(
    log_q: Float32[Array, "b v"], width: int, sampling: SamplingState
) -> tuple[Float32[Array, "b c"], Int32[Array, "b c"]]:
    """The `width` most likely tokens and their log probabilities among themselves; no search if all are greedy."""

    def one_hot() -> tuple[Float32[Array, "b c"], Int32[Array, "b c"]]:
        first = jnp.arange(width)[None] == 0
        shape = (log_q.shape[0], width)
        log_top = jnp.broadcast_to(jnp.where(first, jnp.float32(0), -jnp.inf), shape)
        return log_top, jnp.broadcast_to(argmax(log_q)[:, None], shape)

    def search() -> tuple[Float32[Array, "b c"], Int32[Array, "b c"]]:
        log_top, ids = jax.lax.top_k(log_q, width)
        return jax.nn.log_softmax(log_top, axis=-1), ids

    return jax.lax.cond(jnp.all(sampling.is_greedy), one_hot, search)


def _passes_test(
    log_p: Float32[Array, "b k v"],
    drafts: Int32[Array, "b k"],
    proposal: Proposal,
    sampling: SamplingState,
    positions: Int32[Array, "b k"],
) -> Bool[Array, "b k"]:
    """u < p(d) / q(d), strictly, so that a draft with p = 0 never passes."""
    p = jnp.exp(jnp.take_along_axis(log_p, drafts[:, :, None], axis=2, mode="clip")[:, :, 0])
    q = jnp.sum(jnp.where(proposal.ids == drafts[:, :, None], proposal.probs, 0), axis=-1)
    u = uniform(row_keys(sampling.seed, positions, Purpose.ACCEPT))
    return u * q < p


def _subtract_rejected(
    log_p: Float32[Array, "b 1 v"], num_accepted: Int32[Array, "b"], count: Int32[Array, "b"], proposal: Proposal
) -> Float32[Array, "b 1 v"]:
    """log max(p - q, 0) on rows whose draft at this place was rejected; not normalised, which a draw ignores."""
    rejected = num_accepted < count
    place = jnp.minimum(num_accepted, proposal.ids.shape[1] - 1)[:, None, None]
    ids = jnp.take_along_axis(proposal.ids, place, axis=1)[:, 0]
    q = jnp.take_along_axis(proposal.probs, place, axis=1)[:, 0]
    rows = jnp.arange(ids.shape[0])[:, None]
    residual = jnp.maximum(jnp.exp(log_p[:, 0]).at[rows, ids].add(-q), 0)
    # Where p = q, rounding alone can reject a draft, and may leave nothing to draw from.
    use = rejected & jnp.any(residual > 0, axis=-1)
    return jnp.where(use[:, None], jnp.log(residual), log_p[:, 0])[:, None]


def _accepted_prefix(accept: Bool[Array, "b k"], count: Int32[Array, "b"]) -> Int32[Array, "b"]:
    """Length of the leading run of accepted drafts, at most `count`."""
    num_drafts = accept.shape[1]
    place = jnp.arange(num_drafts, dtype=jnp.int32)[None]
    first_refused = jnp.min(jnp.where(accept, num_drafts, place), axis=1, initial=num_drafts)
    return jnp.minimum(first_refused, count)


def stop_and_limit(
    tokens: Int32[Array, "b t"],
    num_emitted: Int32[Array, "b"],
    stop_ids: Int32[Array, "b n"],
    room: Int32[Array, "b"],
) -> tuple[Int32[Array, "b"], Bool[Array, "b"], Bool[Array, "b"]]:
    """Where the output ends when the emitted tokens are committed one by one: stop first, then length.

    Args:
        tokens: a verdict's tokens.
        num_emitted: how many of them were emitted.
        stop_ids: tokens that end the output and belong to it; -1 equals none.
        room: tokens the row may still commit.

    Returns:
        Tokens to commit (0 where there is no room); whether the last of them is a stop token; whether the row
        ended for want of room instead.
    """
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    limit = jnp.minimum(num_emitted, room)
    is_stop = jnp.any(tokens[:, :, None] == stop_ids[:, None, :], axis=-1)
    through_stop = jnp.min(jnp.where(is_stop, place + 1, tokens.shape[1] + 1), axis=1)
    stopped = through_stop <= limit
    return jnp.minimum(through_stop, limit), stopped, ~stopped & (num_emitted >= room)


ACCEPTANCE_RULES: Mapping[str, AcceptanceRule] = MappingProxyType({"coupled": Coupled(), "rejection": Rejection()})
