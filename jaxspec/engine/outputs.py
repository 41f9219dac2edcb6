"""What a request gives back, under vLLM's names, and the counts of speculation."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from jaxspec.decoding.state import Finish

FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ERROR: "error"}
NOT_FINITE = "the model gave logits that are not finite"


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One completion.

    Attributes:
        index: which of the request's completions this is; always 0.
        text: the generated text, without the token that stopped it.
        token_ids: the generated tokens, the one that stopped it included.
        finish_reason: "stop", "length" or "error"; None while there is more to come.
        stop_reason: the token that stopped it, None when it was one of the model's own or none did.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The result of one request.

    Attributes:
        request_id: the one it was added with, or its place in the call, as text.
        prompt: the prompt's text, None when it was given as ids and there is no tokenizer.
        prompt_token_ids: the prompt's tokens.
        outputs: the completions.
        finished: whether nothing more will come.
        metrics: this request's counts.
        error: why the request failed, None when it did not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: Metrics
    error: str | None = None


@dataclasses.dataclass
class Metrics:
    """Counts of speculation, by vLLM's names.

    Attributes:
        num_drafts: verifications with at least one draft.
        num_draft_tokens: drafts verified.
        num_accepted_tokens: drafts accepted.
        num_accepted_tokens_per_pos: how often the draft at each place was accepted.
        num_generated_tokens: tokens given out.
        num_preemptions: how often a request lost its pages to older ones, to start again later from its tokens.
        num_stalls: rounds that a row had to sit out for want of pages.
        num_steps: reports read.
        prefix_cache_queries: tokens that requests started with and that were looked for in the prefix cache.
        prefix_cache_hits: those of them that were found there.
        pages_held: by all rows, when last heard of; a page that two share counts twice.
        peak_pages_held: the most of that.
        seconds_compile: time spent compiling.
        seconds_decode: time spent in prefill and decoding.
        seconds_idle: part of it during which the device waited for the host, at most.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = dataclasses.field(default_factory=list)
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_stalls: int = 0
    num_steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    pages_held: int = 0
    peak_pages_held: int = 0
    seconds_compile: float = 0.0
    seconds_decode: float = 0.0
    seconds_idle: float = 0.0

    def count_round(self, num_tokens: int, num_drafts: int, num_accepted: int, stalled: bool) -> None:
        """Counts what one round did for one row. `num_accepted_tokens_per_pos` has a place for every draft."""
        self.num_generated_tokens += num_tokens
        self.num_drafts += num_drafts > 0
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.num_stalls += stalled
        for place in range(num_accepted):
            self.num_accepted_tokens_per_pos[place] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification with drafts, the target's own token included; 1 when there was none."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Share of verifications that accepted the draft at each place."""
        return [n / max(self.num_drafts, 1) for n in self.num_accepted_tokens_per_pos]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time spent decoding; 0 where no time was taken."""
        return self.num_generated_tokens / self.seconds_decode if self.seconds_decode else 0.0

    def __add__(self, other: Metrics) -> Metrics:
        places = (self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos)
        total = {"num_accepted_tokens_per_pos": [sum(place) for place in itertools.zip_longest(*places, fillvalue=0)]}
        for name in ("pages_held", "peak_pages_held"):
            total[name] = max(getattr(self, name), getattr(other, name))
        for name in {field.name for field in dataclasses.fields(self)} - total.keys():
            total[name] = getattr(self, name) + getattr(other, name)
        return Metrics(**total)

    def summary(self) -> str:
        """One line of what matters, without what there was none of."""
        parts = [f"{self.num_generated_tokens} tokens at {self.tokens_per_second:.0f} tokens/s"]
        if self.num_drafts:
            rates = ", ".join(f"{rate:.0%}" for rate in self.acceptance_rate_per_position)
            parts.append(
                f"{self.mean_acceptance_length:.2f} tokens per verification, drafts accepted by position: {rates}"
            )
        if self.prefix_cache_hits:
            parts.append(f"{self.prefix_cache_hits / self.prefix_cache_queries:.0%} of prompts from the prefix cache")
        counts = {"preemption": self.num_preemptions, "stall": self.num_stalls}
        parts += [f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count]
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """All counts and rates as plain values."""
        counts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del counts["num_accepted_tokens_per_pos"]
        return counts | {
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate_per_position": self.acceptance_rate_per_position,
            "tokens_per_second": self.tokens_per_second,
        }
