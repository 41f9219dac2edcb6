"""`LLM`: load a checkpoint, generate batches."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tqdm import tqdm

from jaxspec.cache import KVCache
from jaxspec.checkpoint import load, load_tokenizer, read_config, resolve
from jaxspec.checkpoint.reader import WeightFormat
from jaxspec.config import ModelConfig, SpeculativeConfig
from jaxspec.decoding.loop import Generation, generate
from jaxspec.decoding.state import Finish, init_state, pages_per_row
from jaxspec.drafters import DRAFTERS
from jaxspec.engine.outputs import ERRORS, FINISH_REASONS, CompletionOutput, Metrics, RequestOutput
from jaxspec.engine.requests import Prompt, Request, as_params, as_prompts, make_request
from jaxspec.models.params import Params
from jaxspec.sampling.params import SamplingParams, SamplingState

_SMALLEST_BUCKET = 16


def _generate_wave(
    params: Params,
    cache: KVCache,
    sampling: SamplingState,
    prompts: Int[Array, "b t"],
    lengths: Int[Array, "b"],
    limits: Int[Array, "b"],
    *,
    config: ModelConfig,
    spec: SpeculativeConfig,
    max_model_len: int,
    max_new_tokens: int,
) -> tuple[KVCache, Generation]:
    """A whole wave: the rows are made inside, so that the pools are all that is donated and handed back."""
    state = init_state(config, spec, cache, sampling, max_model_len)
    state, generation = generate(params, config, spec, state, prompts, lengths, limits, max_new_tokens)
    return state.cache, generation


_GENERATE_WAVE = jax.jit(
    _generate_wave, static_argnames=("config", "spec", "max_model_len", "max_new_tokens"), donate_argnames="cache"
)


def bundled_checkpoint() -> Path:
    """Folder of the small trained model that comes with this library."""
    package = Path(__file__).parents[1]
    candidates = (package.parent / "checkpoints" / "stdlib-9m", package / "bundled")
    return next((path for path in candidates if (path / "config.json").is_file()), candidates[0])


class LLM:
    """A model, its tokenizer and its KV cache, for batch generation in this process.

    Args:
        model: folder of a Hugging Face checkpoint or of a converted one, or a model's name on the hub (with the extra
            "hub"); None is the one that comes with the library.
        speculative_config: None decodes one token a round; otherwise a `SpeculativeConfig` or its fields, as in
            `{"method": "mtp", "num_speculative_tokens": 3}`.
        max_model_len: most tokens of one request, prompt and output. None is the model's own limit, but at most
            4096.
        max_num_seqs: most requests decoded at once; more run in waves.
        dtype: of activations and KV cache: "auto" is float32 on a CPU and what the checkpoint stores elsewhere; or
            bfloat16, float16, float32. Weights stored narrower stay so and widen where they are used, which changes
            no result and halves what a step reads.
        weight_format: of weights that the checkpoint has in FP8: "dequantized" or "fp8", as in `load`. None is the
            first, or what the checkpoint was converted to.
        page_size: tokens a page of the KV cache holds.
        num_pages: pages of the KV cache, the scratch page included. None holds `max_num_seqs` full requests.
        seed: makes the seeds of requests without one reproducible; None takes them from the operating system.

    Raises:
        ValueError: the checkpoint or an option cannot be honoured.
    """

    def __init__(
        self,
        model: str | os.PathLike | None = None,
        *,
        speculative_config: SpeculativeConfig | dict[str, Any] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        dtype: Any = "auto",
        weight_format: WeightFormat | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        seed: int | None = None,
    ) -> None:
        path = bundled_checkpoint() if model is None else resolve(model)
        self.spec = _as_spec(speculative_config)
        self.max_num_seqs = _at_least_one("max_num_seqs", max_num_seqs)
        self.page_size = _at_least_one("page_size", page_size)
        self._seeds = None if seed is None else np.random.default_rng(seed)
        # Whatever can be refused without the weights is refused before they are read.
        self.config = read_config(path)
        if self.spec.num_speculative_tokens:
            DRAFTERS[self.spec.method].check(self.config)
        self.tokenizer = load_tokenizer(path, self.config.vocab_size)
        self.max_model_len = self._limit(max_model_len)
        self.num_pages = self._pool(num_pages)
        if isinstance(dtype, str) and dtype == "auto":
            dtype = jnp.float32 if jax.default_backend() == "cpu" else None
        self.config, self.params = load(path, dtype, widen=False, weight_format=weight_format)
        self._activations = self.params.embed.dtype if dtype is None else jnp.dtype(dtype)
        self._cache: KVCache | None = None
        self._programs: dict[tuple, Any] = {}
        self._metrics = Metrics()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Generates a completion for every prompt.

        Args:
            prompts: texts or lists of token ids, one or many.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show progress; None shows it on a terminal only.

        Returns:
            One output per prompt, in their order. A request that cannot run has `error` set and
            finish_reason "error"; the others complete.

        Raises:
            ValueError: what was passed is no prompt, or the only request cannot run.
        """
        listed = as_prompts(prompts)
        params = as_params(sampling_params, len(listed))
        requests = [
            make_request(prompt, param, self.config, self.tokenizer, self.max_model_len)
            for prompt, param in zip(listed, params, strict=True)
        ]
        if len(requests) == 1 and requests[0].error is not None:
            raise ValueError(requests[0].error)
        outputs = {i: _failed(i, request) for i, request in enumerate(requests) if request.error is not None}
        with tqdm(total=len(requests), initial=len(outputs), unit="req", disable=_hidden(use_tqdm)) as bar:
            for wave in self._waves(requests):
                results = self._run_wave([requests[i] for i in wave])
                outputs |= {
                    i: dataclasses.replace(out, request_id=str(i)) for i, out in zip(wave, results, strict=True)
                }
                bar.update(len(wave))
                bar.set_postfix_str(_summary(self._metrics))
        return [outputs[i] for i in range(len(requests))]

    def get_metrics(self) -> Metrics:
        """Counts of everything generated since the start, or since `reset_metrics`."""
        return self._metrics

    def reset_metrics(self) -> None:
        """Starts counting anew."""
        self._metrics = Metrics()

    def _limit(self, max_model_len: int | None) -> int:
        own = self.config.max_position_embeddings
        if max_model_len is None:
            return min(own, 4096, self.config.index_topk or own)
        if not 2 <= _at_least_one("max_model_len", max_model_len) <= own:
            raise ValueError(f"max_model_len: got {max_model_len}, expected 2..{own} (the model's own limit)")
        self.config.check_context("max_model_len", max_model_len)
        return max_model_len

    def _pool(self, num_pages: int | None) -> int:
        per_row = pages_per_row(self.max_model_len, self.spec.num_speculative_tokens, self.page_size)
        if num_pages is None:
            return self.max_num_seqs * per_row + 1
        if _at_least_one("num_pages", num_pages) < per_row + 1:
            raise ValueError(
                f"num_pages: got {num_pages}, expected at least {per_row + 1}: one request of max_model_len "
                f"{self.max_model_len} with {self.spec.num_speculative_tokens} drafts, and the scratch page"
            )
        return num_pages

    def _pages(self, request: Request) -> int:
        most = len(request.token_ids) + request.max_new_tokens
        return pages_per_row(most, self.spec.num_speculative_tokens, self.page_size)

    def _waves(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Splits the requests that can run, in order, so that each wave fits the rows and the pool."""
        wave, pages = [], 0
        for i, request in enumerate(requests):
            if request.error is not None:
                continue
            more = self._pages(request)
            if wave and (len(wave) == self.max_num_seqs or pages + more > self.num_pages - 1):
                yield wave
                wave, pages = [], 0
            wave.append(i)
            pages += more
        if wave:
            yield wave

    def _run_wave(self, wave: list[Request]) -> list[RequestOutput]:
        arguments, max_new_tokens = self._batch(wave)
        started = time.perf_counter()
        program = self._compiled(arguments, max_new_tokens)
        compiled = time.perf_counter()
        self._cache = None  # donated: gone if the program fails, and then made anew
        cache, generation = program(*arguments)
        found = jax.device_get(vars(generation))
        decoded = time.perf_counter()
        self._cache = cache
        outputs = [
            self._output(request, {name: rows[row] for name, rows in found.items()})
            for row, request in enumerate(wave)
        ]
        total = sum((out.metrics for out in outputs), Metrics())
        self._metrics += dataclasses.replace(
            total, seconds_compile=compiled - started, seconds_decode=decoded - compiled
        )
        return outputs

    def _batch(self, wave: list[Request]) -> tuple[tuple, int]:
        """A wave's arguments, padded to buckets so that few shapes are ever compiled, and its output's width."""
        rows = _bucket(len(wave), 1, self.max_num_seqs)
        width = _bucket(max(len(r.token_ids) for r in wave), _SMALLEST_BUCKET, self.max_model_len)
        max_new_tokens = _bucket(max(r.max_new_tokens for r in wave), _SMALLEST_BUCKET, self.max_model_len)
        num_stop_ids = _bucket(max(len(r.stop_ids) for r in wave), 4, self.config.vocab_size)
        prompts = np.zeros((rows, width), np.int32)
        lengths, limits = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for row, request in enumerate(wave):
            lengths[row] = len(request.token_ids)
            limits[row] = len(request.token_ids) + request.max_new_tokens
            prompts[row, : lengths[row]] = request.token_ids
        sampling = [(r.params, self._seed(r.params), r.stop_ids) for r in wave]
        sampling += [(SamplingParams(temperature=0.0), 0, ())] * (rows - len(wave))
        cache = self._cache
        if cache is None:
            cache = KVCache.create(self.config, self.num_pages, self.page_size, self._activations)
        arrays = jax.device_put((prompts, lengths, limits))
        return (self.params, cache, SamplingState.stack(sampling, num_stop_ids), *arrays), max_new_tokens

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        return secrets.randbits(63) if self._seeds is None else int(self._seeds.integers(2**63))

    def _compiled(self, arguments: tuple, max_new_tokens: int) -> Any:
        """The program for these shapes, compiled when they are new."""
        _, _, sampling, prompts, _, _ = arguments
        key = (prompts.shape, sampling.stop_ids.shape, max_new_tokens)
        if key not in self._programs:
            lowered = _GENERATE_WAVE.lower(
                *arguments,
                config=self.config,
                spec=self.spec,
                max_model_len=self.max_model_len,
                max_new_tokens=max_new_tokens,
            )
            self._programs[key] = lowered.compile()
        return self._programs[key]

    def _output(self, request: Request, found: dict[str, np.ndarray]) -> RequestOutput:
        """From the request's row of each field of `Generation`, on the host."""
        finish = Finish(int(found["finish"]))
        ids = found["tokens"][: found["num_tokens"]].tolist()
        shown = ids[:-1] if finish == Finish.STOP else ids
        completion = CompletionOutput(
            index=0,
            text="" if self.tokenizer is None else self.tokenizer.decode(shown),
            token_ids=ids,
            finish_reason=FINISH_REASONS[finish],
            stop_reason=ids[-1] if finish == Finish.STOP and ids[-1] in request.params.stop_token_ids else None,
        )
        accepted = found["accepted_at"].tolist()
        metrics = Metrics(
            num_drafts=int(found["num_rounds"]),
            num_draft_tokens=int(found["num_draft_tokens"]),
            num_accepted_tokens=sum(accepted),
            num_accepted_tokens_per_pos=accepted,
            num_generated_tokens=len(ids),
        )
        return RequestOutput(
            "", request.text, list(request.token_ids), [completion], True, metrics, ERRORS.get(finish)
        )


def _as_spec(given: SpeculativeConfig | dict[str, Any] | None) -> SpeculativeConfig:
    if given is None:
        return SpeculativeConfig(num_speculative_tokens=0)
    if isinstance(given, SpeculativeConfig):
        return given
    fields = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    unknown = sorted(given.keys() - fields)
    if unknown:
        raise ValueError(f"speculative_config: got unknown keys {unknown}, expected some of {sorted(fields)}")
    return SpeculativeConfig(**given)


def _at_least_one(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: got {value!r}, expected an integer of at least 1")
    return value


def _bucket(size: int, smallest: int, largest: int) -> int:
    """The next power of two from `smallest` on, or `largest` if that is less."""
    bucket = smallest
    while bucket < size:
        bucket *= 2
    return min(bucket, largest)


def _failed(index: int, request: Request) -> RequestOutput:
    completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
    ids = list(request.token_ids)
    return RequestOutput(str(index), request.text, ids, [completion], True, Metrics(), request.error)


def _hidden(use_tqdm: bool | None) -> bool | None:
    return None if use_tqdm is None else not use_tqdm  # tqdm's None: hidden unless on a terminal


def _summary(metrics: Metrics) -> str:
    speed = f"{metrics.tokens_per_second:.0f} tok/s"
    return f"{speed}, {metrics.mean_acceptance_length:.2f} tok/round" if metrics.num_drafts else speed
