"""How many drafts each round gets: by batch size, by what requests want, and by whether drafting pays at all.

The host decides before it dispatches, one K for all rows. It looks at counts of what was accepted, never at drafted
tokens, so both acceptance rules stay exact whatever it chooses.
"""

from __future__ import annotations

import collections
import statistics

from jaxspec.config import SpeculativeConfig


class DraftLength:
    """K of every round, as TensorRT-LLM's `draft_len_schedule` and acceptance gate choose it.

    Args:
        spec: the speculation.

    Attributes:
        is_off: drafting is off for good, so that nothing needs to keep the drafter warm.
        values: every K that `choose` may return: those of the schedule, and 0.
    """

    def __init__(self, spec: SpeculativeConfig) -> None:
        most = spec.num_speculative_tokens
        self.is_off = most == 0
        self.values = tuple(sorted({0, *(k for _, k in spec.draft_len_schedule or ((1, most),))}))
        self._spec = spec
        self._rates: collections.deque[float] = collections.deque(maxlen=spec.acceptance_rate_window_size)

    def choose(self, num_rows: int, most_wanted: int) -> int:
        """K of the next round: the least for which there is a program that gives every request what it may have.

        Args:
            num_rows: rows that decode.
            most_wanted: the most drafts that any of their requests wants.
        """
        enough = 0 if self.is_off else min(self._scheduled(num_rows), most_wanted)
        return next(k for k in self.values if k >= enough)

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Takes note of a round, and may turn drafting off.

        Args:
            num_draft_tokens: drafts verified, of all rows; a round without any says nothing about drafting.
            num_accepted_tokens: how many of them were accepted.
        """
        window, threshold = self._spec.acceptance_rate_window_size, self._spec.acceptance_rate_threshold
        if window is None or threshold is None or not num_draft_tokens:
            return
        self._rates.append(num_accepted_tokens / num_draft_tokens)
        if len(self._rates) == window and statistics.fmean(self._rates) < threshold:
            self.is_off = True

    def _scheduled(self, num_rows: int) -> int:
        schedule = self._spec.draft_len_schedule
        if schedule is None:
            return self._spec.num_speculative_tokens
        return next((k for rows, k in schedule if num_rows <= rows), 0)
