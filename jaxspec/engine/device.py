"""What an engine keeps on the device: the rows, and the programs that change them, each compiled once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.config import ModelConfig, SpeculativeConfig
from jaxspec.decoding.serving import (
    Serving,
    StepInfo,
    admit,
    publish_pages,
    serve_prompts,
    serve_rounds,
    serving_faults,
    vacate,
    withdraw_pages,
)
from jaxspec.decoding.state import init_state
from jaxspec.engine.options import EngineConfig
from jaxspec.models.params import Params
from jaxspec.sampling.params import SamplingParams, SamplingState

_ADMIT = jax.jit(admit, donate_argnames="serving")
_VACATE = jax.jit(vacate, donate_argnames="serving")
_PUBLISH = jax.jit(publish_pages, donate_argnames="serving")
_WITHDRAW = jax.jit(withdraw_pages, donate_argnames="serving")
_FAULTS = jax.jit(serving_faults)
_PROMPTS = jax.jit(serve_prompts, static_argnames=("config", "spec", "num_rows", "width"), donate_argnames="serving")
_ROUNDS = jax.jit(
    serve_rounds,
    static_argnames=("config", "spec", "num_rows", "num_rounds", "num_drafts"),
    donate_argnames="serving",
)
_IDLE = SamplingParams(temperature=0.0)

Report = dict[str, jax.Array]


class Arrival(NamedTuple):
    """A request that gets a row, on the host; see `serving.admit`. `sampling` is a row of `SamplingState.stack`."""

    row: int
    order: int
    token_ids: Sequence[int]
    limit: int
    sampling: tuple[SamplingParams, int, tuple[int, ...]]
    handles: Sequence[int]
    num_cached: int


class Device:
    """Rows and pool. Calls return before the device has done what they ask for.

    Args:
        params: the model's parameters.
        config: the architecture.
        spec: the speculation.
        options: see `EngineConfig`.
        dtype: of activations.

    Attributes:
        seconds_compile: time spent compiling so far.
        seconds_idle: time that the device had no step to do between two steps. The host cannot see when the first of
            them ended, so this is an upper bound.

    Raises:
        ValueError: the pool cannot hold one request of `max_model_len`.
    """

    def __init__(
        self, params: Params, config: ModelConfig, spec: SpeculativeConfig, options: EngineConfig, dtype: Any
    ) -> None:
        self.params, self.config, self.spec, self.options, self.dtype = params, config, spec, options, dtype
        self.num_pages = options.pool_pages(config, spec, dtype)
        self.seconds_compile = self.seconds_idle = 0.0
        self._programs: dict[tuple, Any] = {}
        self._serving: Serving | None = None
        self._newest: jax.Array | None = None
        self._busy_at = 0.0

    @property
    def serving(self) -> Serving:
        """The rows; made when first asked for, and anew after `reset`."""
        if self._serving is None:
            pool = (self.num_pages, self.options.page_size, self.options.pool_dtype(self.dtype))
            cache = KVCache.create(self.config, *pool, self.dtype, self.options.backend())
            rows = [(_IDLE, 0, ())] * self.options.max_num_seqs
            sampling = SamplingState.stack(rows, self.options.num_stop_ids)
            state = init_state(self.config, self.spec, cache, sampling, self.options.max_model_len)
            self._serving = Serving.create(state)
        return self._serving

    def reset(self) -> None:
        """Empties every row and page: after a failure the state is gone, for it had been donated."""
        self._serving = self._newest = None

    # --- Transitions ----------------------------------------------------------------------------------------------

    def admit(self, arrival: Arrival) -> None:
        """See `serving.admit`."""
        self._change(_ADMIT, *self._arrays(arrival))

    def vacate(self, rows: Iterable[int]) -> None:
        """Ends rows and takes their pages back."""
        self._change(_VACATE, self._mask(rows, self.options.max_num_seqs))

    def publish(self, row: int, handles: Mapping[int, int]) -> None:
        """Puts pages of a row, by column, under handles."""
        self._change(_PUBLISH, *jax.device_put((np.int32(row), self._handles(handles))))

    def withdraw(self, handles: Iterable[int]) -> None:
        """Gives up the pages under handles."""
        self._change(_WITHDRAW, self._mask(handles, self.num_pages))

    # --- Steps ----------------------------------------------------------------------------------------------------

    def run_prompts(self, spec: SpeculativeConfig, num_rows: int, width: int) -> Report:
        """A chunk of the oldest prompts. What it reports is on its way to the host."""
        return self._step(_PROMPTS, spec, num_rows=num_rows, width=width)

    def run_rounds(self, spec: SpeculativeConfig, num_rows: int, num_drafts: int) -> Report:
        """Rounds of the rows that decode. What they report is on its way to the host."""
        num_rounds = self.options.rounds_per_dispatch
        return self._step(_ROUNDS, spec, num_rows=num_rows, num_rounds=num_rounds, num_drafts=num_drafts)

    def read(self, report: Report) -> dict[str, np.ndarray]:
        """Waits for a report."""
        waited = not report["finish"].is_ready()
        found = jax.device_get(report)
        if not self._is_idle() or (waited and report["finish"] is self._newest):
            self._busy_at = time.perf_counter()
        return found

    def rest(self) -> None:
        """Nothing is to be done for a while: that is no gap."""
        self._newest = None

    def broken_laws(self) -> list[str]:
        """Names of the laws of table and ledger that are broken now. Waits for the device."""
        found = jax.device_get(self._compiled(_FAULTS, self.serving)(self.serving))
        return [law for law, is_broken in found.items() if is_broken]

    def warmup(self, specs: Mapping[SpeculativeConfig, Sequence[int]]) -> None:
        """Compiles whatever can be called, and runs nothing.

        Args:
            specs: the numbers of drafts to come, with each speculation to come.
        """
        num_rounds = self.options.rounds_per_dispatch
        for spec, drafts in specs.items():
            model = (self.params, self.config, spec, self.serving)
            for num_rows, width in self.options.chunks():
                self._compiled(_PROMPTS, *model, num_rows=num_rows, width=width)
            for num_rows in self.options.rows():
                for num_drafts in drafts:
                    statics = {"num_rows": num_rows, "num_rounds": num_rounds, "num_drafts": num_drafts}
                    self._compiled(_ROUNDS, *model, **statics)
        self._compiled(_ADMIT, self.serving, *self._arrays(Arrival(0, 0, (), 0, (_IDLE, 0, ()), (), 0)))
        self._compiled(_VACATE, self.serving, self._mask((), self.options.max_num_seqs))
        self._compiled(_PUBLISH, self.serving, *jax.device_put((np.int32(0), self._handles({}))))
        self._compiled(_WITHDRAW, self.serving, self._mask((), self.num_pages))
        if self.options.debug:
            self._compiled(_FAULTS, self.serving)

    # --- Calls ----------------------------------------------------------------------------------------------------

    def _step(self, program: Any, spec: SpeculativeConfig, **statics: int) -> Report:
        call = self._compiled(program, self.params, self.config, spec, self.serving, **statics)
        if self._newest is not None and self._is_idle():
            self.seconds_idle += time.perf_counter() - self._busy_at
        info: StepInfo
        self._serving, info = call(self.params, self.serving)
        report = vars(info.rounds) | {"kv_len": info.kv_len, "num_pages": info.num_pages}
        for array in report.values():
            array.copy_to_host_async()
        self._newest, self._busy_at = report["finish"], time.perf_counter()
        return report

    def _change(self, program: Any, *arguments: Any) -> None:
        self._serving = self._compiled(program, self.serving, *arguments)(self.serving, *arguments)

    def _compiled(self, program: Any, *arguments: Any, **statics: int) -> Any:
        key = (program, *(x for x in arguments if isinstance(x, SpeculativeConfig)), *statics.items())
        if key not in self._programs:
            started = time.perf_counter()
            self._programs[key] = program.lower(*arguments, **statics).compile()
            self.seconds_compile += time.perf_counter() - started
        return self._programs[key]

    def _is_idle(self) -> bool:
        return self._newest is None or self._newest.is_ready()

    # --- Arrays ---------------------------------------------------------------------------------------------------

    def _arrays(self, arrival: Arrival) -> tuple:
        row, order, token_ids, limit, sampling, handles, num_cached = arrival
        prompt = np.zeros(self.options.max_model_len, np.int32)
        prompt[: len(token_ids)] = token_ids
        numbers = [np.int32(n) for n in (row, len(token_ids), limit, order, num_cached)]
        arrays = jax.device_put((prompt, *numbers, self._handles(dict(enumerate(handles)))))
        return (*arrays, SamplingState.stack([sampling], self.options.num_stop_ids))

    def _handles(self, columns: Mapping[int, int]) -> np.ndarray:
        """By column; one that is out of range stands for none."""
        handles = np.full(self.serving.state.table.page_ids.shape[1], self.num_pages, np.int32)
        for column, handle in columns.items():
            handles[column] = handle
        return handles

    def _mask(self, places: Iterable[int], size: int) -> jax.Array:
        mask = np.zeros(size, bool)
        mask[list(places)] = True
        return jax.device_put(mask)
