"""Continuous batching: requests come and leave while the device goes on, one step ahead of what the host has read.

The host dispatches work, and reads what earlier work reported; lengths, pages and drafts stay on the device. So all
that it can be wrong about is who is still there: what a row reports counts for the request that had it when the work
was dispatched. A row keeps its pages until the host has read that it ended, and gives them back.
"""

from __future__ import annotations

import collections
import dataclasses
import secrets
import time
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jaxspec.config import ModelConfig, SpeculativeConfig
from jaxspec.decoding.state import Finish
from jaxspec.engine.device import Arrival, Device, Report
from jaxspec.engine.draft_length import DraftLength
from jaxspec.engine.options import EngineConfig
from jaxspec.engine.outputs import Metrics
from jaxspec.engine.prefix_cache import Match, PrefixCache
from jaxspec.engine.requests import Request
from jaxspec.models.params import Params

_ENDED = (Finish.STOP, Finish.LENGTH, Finish.ERROR)


@dataclasses.dataclass
class Live:
    """A request on its way: what it has given, and where it is."""

    request_id: Hashable
    request: Request
    seed: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish: Finish = Finish.RUNNING
    error: str | None = None
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    row: int | None = None
    order: int = 0
    # Its pages in the prefix cache; prompt tokens that no chunk dispatched so far will cache; and the last news.
    holder: Match | None = None
    prefill_left: int = 0
    decoding: bool = False
    stalled: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.finish in _ENDED

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output: what a row starts from, after a preemption too."""
        return [*self.request.token_ids, *self.token_ids]

    @property
    def limit(self) -> int:
        """Tokens of prompt and output, at most."""
        return len(self.request.token_ids) + self.request.max_new_tokens


@dataclasses.dataclass(frozen=True)
class _Work:
    """Work whose report has not been read: who had which row, and how much of their prompts it was to cache."""

    report: Report
    rows: dict[int, tuple[Live, int]]
    prefill: dict[int, int]
    preemptions: int

    def prefills(self, live: Live) -> int:
        """Prompt tokens that it caches for a request, if all goes well."""
        return self.prefill.get(live.row, 0) if self.rows.get(live.row) == (live, live.order) else 0


class Engine:
    """Rows, a pool and a queue.

    Args:
        params: the model's parameters.
        config: the architecture.
        spec: the speculation.
        options: see `EngineConfig`.
        dtype: of activations, and of the pool unless `options` say otherwise.

    Raises:
        ValueError: the pool cannot hold one request of `max_model_len`, or the model does not allow prefix caching.
    """

    def __init__(
        self, params: Params, config: ModelConfig, spec: SpeculativeConfig, options: EngineConfig, dtype: Any
    ) -> None:
        self.config, self.spec, self.options = config, spec, options
        self._row_buckets, self._chunk_buckets = options.rows(), options.chunks()
        self._drafting = spec.for_programs
        self._no_drafting = dataclasses.replace(self._drafting, num_speculative_tokens=0)
        self._device = Device(params, config, self._drafting, options, dtype)
        self._prefix = None
        if options.caches_prefixes(config, spec):
            self._prefix = PrefixCache(options.page_size, self._device.num_pages, spec.num_speculative_tokens > 0)
        self._draft_length = DraftLength(spec)
        self.reset_metrics()
        self._waiting: collections.deque[Live] = collections.deque()
        self._rows: dict[int, Live] = {}
        self._dispatched: collections.deque[_Work] = collections.deque()
        self._known: dict[Hashable, Live] = {}
        self._news: dict[Hashable, Live] = {}
        self._order = self._preemptions = 0

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._known)

    def add_request(self, request_id: Hashable, request: Request, seed: int | None = None) -> None:
        """Queues a request.

        Raises:
            ValueError: the id is taken, or the request cannot run.
        """
        if request_id in self._known:
            raise ValueError(f"request id {request_id!r}: got it twice, expected one that is not running")
        if request.error is not None:
            raise ValueError(request.error)
        live = Live(request_id, request, secrets.randbits(63) if seed is None else seed)
        live.metrics.num_accepted_tokens_per_pos = [0] * self.spec.num_speculative_tokens
        self._known[request_id] = live
        self._waiting.append(live)

    def abort_request(self, request_id: Hashable) -> None:
        """Ends a request; its pages go back at once and nothing more is heard of it.

        Raises:
            ValueError: no such request is waiting or running.
        """
        if request_id not in self._known:
            raise ValueError(f"request id {request_id!r}: got none such, expected one that waits or runs")
        live = self._known.pop(request_id)
        self._news.pop(request_id, None)
        if live.row is not None:
            self._leave([live])
        elif not live.ended:
            self._waiting.remove(live)

    def step(self) -> list[Live]:
        """Admits, dispatches, and reads what is due.

        Returns:
            The requests that have new tokens or have ended.

        Raises:
            Exception: whatever the device reports. Requests with a row have then failed, and are returned by the next
                step; the engine goes on with the others.
        """
        started, before = time.perf_counter(), (self._device.seconds_compile, self._device.seconds_idle)
        try:
            self._admit()
            if self._rows:
                self._make_space()
                self._dispatch()
            while len(self._dispatched) > (self.options.overlap if self._rows else 0):
                self._collect(self._dispatched.popleft())
        except Exception as error:
            self._fail_rows(error)
            raise
        if not self._rows:
            self._device.rest()
        compiling, idle = self._device.seconds_compile - before[0], self._device.seconds_idle - before[1]
        self.metrics.seconds_compile += compiling
        self.metrics.seconds_idle += idle
        self.metrics.seconds_decode += time.perf_counter() - started - compiling
        news, self._news = list(self._news.values()), {}
        for live in news:
            if live.ended:
                del self._known[live.request_id]
        return news

    def warmup(self) -> None:
        """Compiles every program that this engine can ever call, and runs none."""
        before = self._device.seconds_compile
        specs = {self._drafting: self._draft_length.values}
        if self.spec.acceptance_rate_window_size is not None:
            specs[self._no_drafting] = (0,)
        self._device.warmup(specs)
        self.metrics.seconds_compile += self._device.seconds_compile - before

    def reset_metrics(self) -> None:
        """Starts counting anew."""
        self.metrics = Metrics(num_accepted_tokens_per_pos=[0] * self.spec.num_speculative_tokens)

    def reset_prefix_cache(self) -> None:
        """Forgets the pages of past requests; those that running ones share live as long as these."""
        if self._prefix is not None:
            self._withdraw(self._prefix.reset())

    def check_integrity(self) -> None:
        """Checks the laws of table and ledger on the device, and waits for it.

        Raises:
            AssertionError: names the laws that are broken.
        """
        broken = self._device.broken_laws()
        assert not broken, f"broken laws: {broken}"

    # --- Admission ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Gives free rows to waiting requests, first come first served, while pages are likely to be found."""
        free = [row for row in range(self.options.max_num_seqs) if row not in self._rows]
        while free and self._waiting and self._fits(self._waiting[0]):
            self._start(self._waiting.popleft(), free.pop(0))

    def _fits(self, live: Live) -> bool:
        """By what is known here, pages suffice for it and a round of every row. Alone, it always fits."""
        return not self._rows or self._most_pages([*self._rows.values(), live]) < self._device.num_pages

    def _most_pages(self, lives: Sequence[Live]) -> int:
        """Pages that requests may hold, at most, once all is done that has been dispatched and one step more."""
        num_drafts, steps = self.spec.num_speculative_tokens, len(self._dispatched) + 1
        ahead = steps * self.options.rounds_per_dispatch * (1 + num_drafts)
        reach = [min(len(live.all_token_ids) + ahead, live.limit) + 2 * num_drafts for live in lives]
        return sum(-(-tokens // self.options.page_size) for tokens in reach)

    def _start(self, live: Live, row: int) -> None:
        start, handles, num_cached = live.all_token_ids, [], 0
        if self._prefix is not None:
            live.holder = self._prefix.match(start)
            handles, num_cached = live.holder.handles, live.holder.num_tokens
            for metrics in (live.metrics, self.metrics):
                metrics.prefix_cache_queries += len(start)
                metrics.prefix_cache_hits += num_cached
        live.row, live.order, live.prefill_left = row, self._order, len(start) - num_cached
        live.decoding = live.stalled = False
        self._order += 1
        self._rows[row] = live
        sampling = (live.request.params, live.seed, live.request.stop_ids)
        self._device.admit(Arrival(row, live.order, start, live.limit, sampling, handles, num_cached))

    def _leave(self, lives: Sequence[Live]) -> None:
        """Requests give up their rows. Full pages of what they have cached stay for those that start alike."""
        for live in lives:
            self._publish(live)
            if live.holder is not None:
                self._prefix.release(live.holder)
            live.holder = None
        self._device.vacate([live.row for live in lives])
        for live in lives:
            del self._rows[live.row]
            live.row = None

    def _publish(self, live: Live) -> None:
        """Before the prompt is done nothing is known to be finite, so nothing is published."""
        if self._prefix is not None and live.decoding and live.finish != Finish.ERROR:
            tokens = live.all_token_ids
            columns = self._prefix.publish(tokens, len(tokens) - 1, live.holder)
            if columns:
                self._device.publish(live.row, columns)

    def _withdraw(self, handles: Sequence[int]) -> None:
        if handles:
            self._device.withdraw(handles)

    def _make_space(self) -> None:
        """Pages that only the prefix cache holds give way to what the rows may come to need."""
        if self._prefix is not None:
            missing = self._most_pages(list(self._rows.values())) + self._prefix.num_idle + 1 - self._device.num_pages
            if missing > 0:
                # Some more than now, so that this need not be done before every step.
                self._withdraw(self._prefix.evict(missing + self.options.max_num_seqs))

    def _fail_rows(self, error: Exception) -> None:
        """The state was donated to what failed, so the rows are lost and start anew, empty."""
        self._device.reset()
        self._dispatched.clear()
        for live in self._rows.values():
            live.finish, live.error, live.row, live.holder = Finish.ERROR, f"a step failed: {error}", None, None
            self._news[live.request_id] = live
        self._rows.clear()
        if self._prefix is not None:
            self._prefix.reset()

    # --- Work -----------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """A chunk of the oldest prompts, if any is left; and rounds, if any row may decode."""
        spec = self._no_drafting if self._draft_length.is_off else self._drafting
        prefilling = sorted((x for x in self._rows.values() if x.prefill_left), key=lambda x: x.order)
        if prefilling:
            num_rows, width = self._chunk([live.prefill_left for live in prefilling])
            planned = {live.row: min(width, live.prefill_left) for live in prefilling[:num_rows]}
            for row, count in planned.items():
                self._rows[row].prefill_left -= count
            self._sent(self._device.run_prompts(spec, num_rows, width), planned)
        decoding = [live.request.params for live in self._rows.values() if not live.prefill_left]
        if decoding:
            num_rows = next(n for n in self._row_buckets if n >= len(decoding))
            most = self.spec.num_speculative_tokens
            wanted = (most if p.num_speculative_tokens is None else p.num_speculative_tokens for p in decoding)
            num_drafts = self._draft_length.choose(len(decoding), max(wanted))
            self._sent(self._device.run_rounds(spec, num_rows, num_drafts), {})

    def _chunk(self, left: Sequence[int]) -> tuple[int, int]:
        """Rows and width of the chunk that caches most of the oldest prompts; the smallest of these."""
        return max(self._chunk_buckets, key=lambda bucket: sum(min(n, bucket[1]) for n in left[: bucket[0]]))

    def _sent(self, report: Report, prefill: dict[int, int]) -> None:
        rows = {row: (live, live.order) for row, live in self._rows.items()}
        self._dispatched.append(_Work(report, rows, prefill, self._preemptions))
        if self.options.debug:
            self.check_integrity()

    # --- Reports --------------------------------------------------------------------------------------------------

    def _collect(self, work: _Work) -> None:
        """Reads a report. What a row says is for the request that had it, if it has it still."""
        report = self._device.read(work.report)
        here = [live for live, order in work.rows.values() if live.row is not None and live.order == order]
        for live in here:
            row, was_decoding = live.row, live.decoding
            if row in work.prefill or (not work.prefill and was_decoding):
                live.stalled = bool(report["stalled"][-1, row])
            if self._take(live, report):
                self._news[live.request_id] = live
            if not live.decoding:
                # A row that found no pages has fallen behind the plan.
                under_way = sum(later.prefills(live) for later in self._dispatched)
                live.prefill_left = len(live.all_token_ids) - int(report["kv_len"][row]) - under_way
            elif not was_decoding:
                # It may also be ahead of it: the oldest prompts go first, whichever were meant.
                live.prefill_left = 0
                self._publish(live)
        self._settle(here, report)
        if work.preemptions == self._preemptions:
            self._make_room()

    def _settle(self, here: Sequence[Live], report: dict[str, np.ndarray]) -> None:
        """Counts the step, and lets go of the requests that have ended."""
        for drafted, accepted in zip(report["num_drafts"], report["num_accepted"], strict=True):
            self._draft_length.observe(int(drafted.sum()), int(accepted.sum()))
        self.metrics.num_steps += 1
        self.metrics.pages_held = int(report["num_pages"].sum())
        self.metrics.peak_pages_held = max(self.metrics.peak_pages_held, self.metrics.pages_held)
        ended = [live for live in here if live.ended]
        if ended:
            self._leave(ended)

    def _take(self, live: Live, report: dict[str, np.ndarray]) -> bool:
        """Takes over the tokens and counts of a row; whether there is anything new."""
        row, before = live.row, len(live.token_ids)
        names = ("num_tokens", "num_drafts", "num_accepted", "stalled")
        counts = zip(*(report[name][:, row].tolist() for name in names), strict=True)
        for tokens, (num_tokens, *others) in zip(report["tokens"][:, row], counts, strict=True):
            live.token_ids += tokens[:num_tokens].tolist()
            live.decoding |= num_tokens > 0
            for metrics in (live.metrics, self.metrics):
                metrics.count_round(num_tokens, *others)
        finish = Finish(int(report["finish"][-1, row]))
        if finish in _ENDED:
            live.finish, live.prefill_left = finish, 0
        return live.ended or len(live.token_ids) > before

    def _make_room(self) -> None:
        """Preempts the youngest request where one that decodes finds no page, or none at all does."""
        stalled = [live for live in self._rows.values() if live.stalled]
        decoding = any(live.decoding for live in stalled)
        if len(self._rows) > 1 and stalled and (decoding or len(stalled) == len(self._rows)):
            youngest = max(self._rows.values(), key=lambda live: live.order)
            self._leave([youngest])
            for metrics in (youngest.metrics, self.metrics):
                metrics.num_preemptions += 1
            self._preemptions += 1
            self._waiting.appendleft(youngest)
