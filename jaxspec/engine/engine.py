"""Continuous batching: requests come and leave while the device goes on, one step ahead of what the host has read.

The host dispatches work, and reads what earlier work reported; lengths, pages and drafts stay on the device. So all
that it can be wrong about is who is still there: what a row reports counts for the request that had it when the work
was dispatched.
"""

from __future__ import annotations

import collections
import dataclasses
import secrets
import time
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.config import ModelConfig, SpeculativeConfig
from jaxspec.decoding.serving import Serving, admit, serve_prompts, serve_rounds, serving_faults, vacate
from jaxspec.decoding.state import Finish, init_state, pages_per_row
from jaxspec.engine.outputs import Metrics
from jaxspec.engine.requests import Request
from jaxspec.models.params import Params
from jaxspec.sampling.params import SamplingParams, SamplingState

_ADMIT = jax.jit(admit, donate_argnames="serving")
_VACATE = jax.jit(vacate, donate_argnames="serving")
_ROUNDS = jax.jit(
    serve_rounds, static_argnames=("config", "spec", "num_rows", "num_rounds"), donate_argnames="serving"
)
_PROMPTS = jax.jit(serve_prompts, static_argnames=("config", "spec", "num_rows", "width"), donate_argnames="serving")
_FAULTS = jax.jit(serving_faults)
_ENDED = (Finish.STOP, Finish.LENGTH, Finish.ERROR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How requests share the device.

    Attributes:
        max_model_len: most tokens of one request, prompt and output.
        max_num_seqs: rows, that is, most requests at once.
        page_size: tokens a page holds.
        num_pages: pages of the pool, the scratch page included.
        max_num_batched_tokens: prompt tokens cached by one step.
        rounds_per_dispatch: rounds in one program, for hosts that are slow beside the device.
        overlap: how many steps may be under way that the host has not read; 0 waits for each.
        num_stop_ids: most stop tokens of one request, the model's own included.
        debug: check the laws of the page table and of the ledger after every step.
    """

    max_model_len: int
    max_num_seqs: int
    page_size: int
    num_pages: int
    max_num_batched_tokens: int = 256
    rounds_per_dispatch: int = 1
    overlap: int = 1
    num_stop_ids: int = 16
    debug: bool = False


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
    # Prompt tokens that no chunk dispatched so far will cache; and what was last heard of the row.
    prefill_left: int = 0
    num_pages: int = 0
    decoding: bool = False
    stalled: bool = False

    @property
    def start(self) -> list[int]:
        """What the row starts from: the prompt, and after a preemption the output so far."""
        return [*self.request.token_ids, *self.token_ids]


@dataclasses.dataclass(frozen=True)
class _Dispatched:
    """Work whose report has not been read: who had which row, and how much of their prompts it was to cache."""

    report: dict[str, jax.Array]
    rows: dict[int, tuple[Live, int]]
    prefill: dict[int, int]
    preemptions: int


class Engine:
    """Rows, a pool and a queue.

    Args:
        params: the model's parameters.
        config: the architecture.
        spec: the speculation.
        options: see `EngineConfig`.
        dtype: of activations and pools.

    Raises:
        ValueError: the pool cannot hold one request of `max_model_len`.
    """

    def __init__(
        self, params: Params, config: ModelConfig, spec: SpeculativeConfig, options: EngineConfig, dtype: Any
    ) -> None:
        self.params, self.config, self.spec, self.options, self.dtype = params, config, spec, options, dtype
        self.pages_per_request = pages_per_row(options.max_model_len, spec.num_speculative_tokens, options.page_size)
        if options.num_pages < self.pages_per_request + 1:
            raise ValueError(
                f"num_pages: got {options.num_pages}, expected at least {self.pages_per_request + 1}: one request of "
                f"max_model_len {options.max_model_len} with {spec.num_speculative_tokens} drafts, and scratch"
            )
        self.reset_metrics()
        self._waiting: collections.deque[Live] = collections.deque()
        self._rows: dict[int, Live] = {}
        self._dispatched: collections.deque[_Dispatched] = collections.deque()
        self._known: dict[Hashable, Live] = {}
        self._lost: list[Live] = []
        self._programs: dict[tuple, Any] = {}
        self._order = 0
        self._serving: Serving | None = None

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._known or self._lost)

    def add_request(self, request_id: Hashable, request: Request, seed: int | None = None) -> None:
        """Queues a request.

        Raises:
            ValueError: the id is taken, or the request cannot run.
        """
        if request_id in self._known:
            raise ValueError(f"request id {request_id!r}: got it twice, expected one that is not running")
        if request.error is not None:
            raise ValueError(request.error)
        if len(request.stop_ids) > self.options.num_stop_ids:
            raise ValueError(
                f"stop_token_ids: got {len(request.stop_ids)} with the model's own, expected at most "
                f"{self.options.num_stop_ids}"
            )
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
        if live.row is None:
            self._waiting.remove(live)
        else:
            self._vacate(live)

    def reset_metrics(self) -> None:
        """Starts counting anew."""
        self.metrics = Metrics(num_accepted_tokens_per_pos=[0] * self.spec.num_speculative_tokens)

    def step(self) -> list[Live]:
        """Admits, dispatches, and reads what is due.

        Returns:
            The requests that ended, in the order of their ends.

        Raises:
            Exception: whatever the device reports. Requests with a row have then failed, and are returned by the next
                step; the engine goes on with the others.
        """
        if self._serving is None:
            self._serving = self._new_serving()
        try:
            self._admit()
            if self._rows:
                self._dispatch()
            ended, self._lost = self._lost, []
            while len(self._dispatched) > (self.options.overlap if self._rows else 0):
                ended += self._collect(self._dispatched.popleft())
            return ended
        except Exception as error:
            self._fail_rows(error)
            raise

    def _fail_rows(self, error: Exception) -> None:
        """The state was donated to what failed, so the rows are lost and start anew, empty."""
        self._serving = None
        self._dispatched.clear()
        for live in self._rows.values():
            live.finish, live.error, live.row = Finish.ERROR, f"a step failed: {error}", None
            self._known.pop(live.request_id, None)
            self._lost.append(live)
        self._rows.clear()

    def _new_serving(self) -> Serving:
        options = self.options
        cache = KVCache.create(self.config, options.num_pages, options.page_size, self.dtype)
        idle = [(SamplingParams(temperature=0.0), 0, ())] * options.max_num_seqs
        sampling = SamplingState.stack(idle, options.num_stop_ids)
        return Serving.create(init_state(self.config, self.spec, cache, sampling, options.max_model_len))

    # --- Admission ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Gives free rows to waiting requests, first come first served, while pages are likely to be found."""
        free = [row for row in range(self.options.max_num_seqs) if row not in self._rows]
        while free and self._waiting and self._fits(self._waiting[0]):
            self._start(self._waiting[0], free.pop(0))
            self._waiting.popleft()

    def _fits(self, live: Live) -> bool:
        """By what is known here, pages suffice for its start and a round of every row. Alone, it always fits."""
        if not self._rows:
            return True
        margin = self._pages(1 + 2 * self.spec.num_speculative_tokens) * (len(self._rows) + 1)
        taken = sum(max(self._pages(len(other.start)), other.num_pages) for other in self._rows.values())
        return taken + self._pages(len(live.start)) + margin <= self.options.num_pages - 1

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.options.page_size)

    def _start(self, live: Live, row: int) -> None:
        start, request = live.start, live.request
        prompt = np.zeros(self.options.max_model_len, np.int32)
        prompt[: len(start)] = start
        limit = len(request.token_ids) + request.max_new_tokens
        arrays = jax.device_put([prompt, *(np.int32(n) for n in (row, len(start), limit, self._order))])
        sampling = SamplingState.stack([(request.params, live.seed, request.stop_ids)], self.options.num_stop_ids)
        self._serving = self._call(_ADMIT, self._serving, *arrays, sampling)
        live.row, live.order, live.prefill_left = row, self._order, len(start)
        live.num_pages, live.decoding, live.stalled = 0, False, False
        self._order += 1
        self._rows[row] = live

    def _vacate(self, live: Live) -> None:
        rows = np.zeros(self.options.max_num_seqs, bool)
        rows[live.row] = True
        self._serving = self._call(_VACATE, self._serving, jax.device_put(rows))
        del self._rows[live.row]
        live.row = None

    # --- Work -----------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """A chunk of the oldest prompts, if any is left; and rounds, if any row may decode."""
        prefilling = sorted((x for x in self._rows.values() if x.prefill_left), key=lambda x: x.order)
        if prefilling:
            num_rows, width = self._chunk(prefilling)
            planned = {live.row: min(width, live.prefill_left) for live in prefilling[:num_rows]}
            for row, count in planned.items():
                self._rows[row].prefill_left -= count
            self._run(_PROMPTS, planned, num_rows=num_rows, width=width)
        decoding = sum(not live.prefill_left for live in self._rows.values())
        if decoding:
            num_rows = next(n for n in self._row_buckets() if n >= decoding)
            self._run(_ROUNDS, {}, num_rows=num_rows, num_rounds=self.options.rounds_per_dispatch)

    def _chunk(self, prefilling: Sequence[Live]) -> tuple[int, int]:
        """Rows and width of a chunk: many rows for many short prompts, one for a long one.

        Both are powers of four, or the budget, so that few programs are ever compiled.
        """
        left = [live.prefill_left for live in prefilling]
        for rows in (16, 4, 1):
            if rows > self.options.max_num_seqs or (rows > 1 and len(left) <= rows // 4):
                continue
            for width in self._widths():
                if rows * width <= self.options.max_num_batched_tokens and width >= max(left[:rows]):
                    return rows, width
        return 1, self._widths()[-1]

    def _row_buckets(self) -> list[int]:
        most = self.options.max_num_seqs
        return [rows for rows in (1, 4, 16, 64, 256) if rows < most] + [most]

    def _widths(self) -> list[int]:
        most = min(self.options.max_num_batched_tokens, self.options.max_model_len)
        return [width for width in (16, 64, 256, 1024, 4096) if width < most] + [most]

    def _run(self, program: Any, prefill: dict[int, int], **static: int) -> None:
        arguments = (self.params, self.config, self.spec, self._serving)
        self._serving, info = self._call(program, *arguments, **static)
        report = vars(info.rounds) | {"num_prefilled": info.num_prefilled, "num_pages": info.num_pages}
        for array in report.values():
            array.copy_to_host_async()
        rows = {row: (live, live.order) for row, live in self._rows.items()}
        self._dispatched.append(_Dispatched(report, rows, prefill, self.metrics.num_preemptions))
        if self.options.debug:
            self.check_integrity()

    def _call(self, program: Any, *arguments: Any, **static: int) -> Any:
        """Calls a program, compiled once, and counts the seconds that takes."""
        key = (program, *static.items())
        if key not in self._programs:
            started = time.perf_counter()
            self._programs[key] = program.lower(*arguments, **static).compile()
            self.metrics.seconds_compile += time.perf_counter() - started
        return self._programs[key](*(x for x in arguments if x is not self.config and x is not self.spec))

    def check_integrity(self) -> None:
        """Checks the laws of table and ledger on the device, and waits for it.

        Raises:
            AssertionError: names the laws that are broken.
        """
        if self._serving is not None:
            broken = [law for law, is_broken in jax.device_get(_FAULTS(self._serving)).items() if is_broken]
            assert not broken, f"broken laws: {broken}"

    # --- Reports --------------------------------------------------------------------------------------------------

    def _collect(self, work: _Dispatched) -> list[Live]:
        """Reads a report. What a row says is for the request that had it, if it has it still."""
        report = jax.device_get(work.report)
        here = {row: live for row, (live, order) in work.rows.items() if live.row == row and live.order == order}
        ended: list[Live] = []
        for row, live in here.items():
            # A row that found no pages has fallen behind the plan, and goes on before those that were to follow it.
            live.prefill_left += work.prefill.get(row, 0) - int(report["num_prefilled"][row])
            live.num_pages = int(report["num_pages"][row])
            if row in work.prefill or (not work.prefill and live.decoding):
                live.stalled = bool(report["stalled"][-1, row])
            self._append(live, row, report)
            if live.finish in _ENDED:
                live.row = None
                del self._rows[row], self._known[live.request_id]
                ended.append(live)
        self.metrics.num_steps += 1
        if work.preemptions == self.metrics.num_preemptions:
            self._make_room()
        return ended

    def _append(self, live: Live, row: int, report: dict[str, np.ndarray]) -> None:
        """Takes over the tokens and counts of one row."""
        names = ("num_tokens", "num_drafts", "num_accepted", "stalled")
        counts = zip(*(report[name][:, row].tolist() for name in names), strict=True)
        for tokens, (num_tokens, *others) in zip(report["tokens"][:, row], counts, strict=True):
            live.token_ids += tokens[:num_tokens].tolist()
            live.decoding |= num_tokens > 0
            for metrics in (live.metrics, self.metrics):
                metrics.count_round(num_tokens, *others)
        finish = Finish(int(report["finish"][-1, row]))
        if finish in _ENDED:
            live.finish = finish

    def _make_room(self) -> None:
        """Preempts the youngest request where one that decodes finds no page, or none at all does."""
        stalled = [live for live in self._rows.values() if live.stalled]
        decoding = any(live.decoding for live in stalled)
        if len(self._rows) > 1 and stalled and (decoding or len(stalled) == len(self._rows)):
            youngest = max(self._rows.values(), key=lambda live: live.order)
            self._vacate(youngest)
            youngest.metrics.num_preemptions += 1
            self.metrics.num_preemptions += 1
            self._waiting.appendleft(youngest)
