"""`LLM`: load a checkpoint, generate batches, or requests as they come."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.checkpoint import load, load_tokenizer, read_config, resolve
from jaxspec.checkpoint.reader import WeightFormat
from jaxspec.config import SpeculativeConfig
from jaxspec.decoding.state import Finish
from jaxspec.drafters import DRAFTERS
from jaxspec.engine.engine import Engine, Live
from jaxspec.engine.options import EngineConfig
from jaxspec.engine.outputs import FINISH_REASONS, NOT_FINITE, CompletionOutput, Metrics, RequestOutput
from jaxspec.engine.requests import Prompt, Request, as_params, as_prompts, make_request
from jaxspec.sampling.params import SamplingParams


def bundled_checkpoint() -> Path:
    """Folder of the small trained model that comes with this library."""
    package = Path(__file__).parents[1]
    candidates = (package.parent / "checkpoints" / "stdlib-9m", package / "bundled")
    return next((path for path in candidates if (path / "config.json").is_file()), candidates[0])


class LLM:
    """A model, its tokenizer and its KV cache, in this process.

    `generate` runs batches. `add_request`, `step` and `abort_request` run requests that come at any time; both may be
    used by turns, over the same rows.

    Args:
        model: folder of a Hugging Face checkpoint or of a converted one, or a model's name on the hub (with the extra
            "hub"); None is the one that comes with the library.
        speculative_config: None decodes one token a round; otherwise a `SpeculativeConfig` or its fields, as in
            `{"method": "mtp", "num_speculative_tokens": 3}`.
        max_model_len: most tokens of one request, prompt and output. None is the model's own limit, but at most
            4096.
        max_num_seqs: most requests decoded at once; more wait for a row.
        page_size: tokens a page of the KV cache holds.
        num_pages: pages of the KV cache, the scratch page included. None holds `max_num_seqs` full requests.
        kv_cache_dtype: of the KV cache: "auto" is `dtype`; "bfloat16", "float32"; or "fp8" (also "fp8_e4m3"), which
            takes 656 bytes a token and layer of the released models instead of 1152.
        dtype: of activations: "auto" is float32 on a CPU and what the checkpoint stores elsewhere; or
            bfloat16, float16, float32. Weights stored narrower stay so and widen where they are used, which changes
            no result and halves what a step reads.
        weight_format: of weights that the checkpoint has in FP8: "dequantized" or "fp8", as in `load`. None is the
            first, or what the checkpoint was converted to.
        seed: makes the seeds of requests without one reproducible; None takes them from the operating system.
        engine_config: other fields of `EngineConfig`, as in `{"overlap": 0}`.

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
        page_size: int = 16,
        num_pages: int | None = None,
        kv_cache_dtype: str = "auto",
        dtype: Any = "auto",
        weight_format: WeightFormat | None = None,
        seed: int | None = None,
        engine_config: dict[str, Any] | None = None,
    ) -> None:
        path = bundled_checkpoint() if model is None else resolve(model)
        self.spec = spec = _as_spec(speculative_config)
        self._seeds = None if seed is None else np.random.default_rng(seed)
        # Whatever can be refused without the weights is refused before they are read.
        self.config = read_config(path)
        if spec.num_speculative_tokens:
            DRAFTERS[spec.method].check(self.config)
        self.tokenizer = load_tokenizer(path, self.config.vocab_size)
        sizes = {"max_num_seqs": max_num_seqs, "page_size": page_size, "num_pages": num_pages}
        sizes["kv_cache_dtype"] = kv_cache_dtype
        others = {} if engine_config is None else engine_config
        _check_names("engine_config", others, EngineConfig)
        options = EngineConfig(**sizes | {"max_model_len": self._limit(max_model_len)} | others)
        if isinstance(dtype, str) and dtype == "auto":
            dtype = jnp.float32 if jax.default_backend() == "cpu" else None
        options.caches_prefixes(self.config, spec)
        options.backend()
        options.pool_pages(self.config, spec, jnp.bfloat16 if dtype is None else dtype)
        self.config, self.params = load(path, dtype, widen=False, weight_format=weight_format)
        activations = self.params.embed.dtype if dtype is None else jnp.dtype(dtype)
        self.max_model_len = options.max_model_len
        self._engine = Engine(self.params, self.config, spec, options, activations)
        self._calls = itertools.count()
        self._unseen: dict[Hashable, Live] = {}

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
        requests = [self._request(prompt, param) for prompt, param in zip(listed, params, strict=True)]
        if len(requests) == 1 and requests[0].error is not None:
            raise ValueError(requests[0].error)
        outputs = {i: _failed(i, request) for i, request in enumerate(requests) if request.error is not None}
        ids = {(next(self._calls), i): i for i in range(len(requests)) if i not in outputs}
        with tqdm(total=len(requests), initial=len(outputs), unit="req", disable=_hidden(use_tqdm)) as bar:
            for live in self._run(ids, requests):
                i = ids[live.request_id]
                outputs[i] = self._output(live, str(i))
                bar.update()
                bar.set_postfix_str(self.get_metrics().summary())
        return [outputs[i] for i in range(len(requests))]

    def add_request(self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None) -> None:
        """Queues a request for `step`.

        Raises:
            ValueError: the id is that of a request under way, or the request cannot run.
        """
        if not isinstance(request_id, str):
            raise ValueError(f"request_id: got {request_id!r}, expected a str")
        listed, [params] = as_prompts(prompt), as_params(sampling_params, 1)
        if len(listed) != 1:
            raise ValueError(f"prompt: got {len(listed)}, expected one")
        request = self._request(listed[0], params)
        self._engine.add_request(request_id, request, self._seed(params))

    def step(self) -> list[RequestOutput]:
        """Goes on with all requests; nothing to do is no error.

        Returns:
            Outputs so far of the requests with new tokens, and of those that have ended.
        """
        news, self._unseen = self._unseen | {live.request_id: live for live in self._engine.step()}, {}
        return [self._output(live, request_id) for request_id, live in news.items()]

    def abort_request(self, request_id: str) -> None:
        """Ends a request without an output.

        Raises:
            ValueError: no such request is under way.
        """
        self._engine.abort_request(request_id)
        self._unseen.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._unseen) or self._engine.has_unfinished_requests

    def warmup(self) -> None:
        """Compiles now whatever later calls may need, so that none of them has to wait for it."""
        self._engine.warmup()

    def get_metrics(self) -> Metrics:
        """Counts of everything generated since the start, or since `reset_metrics`."""
        return self._engine.metrics

    def reset_metrics(self) -> None:
        """Starts counting anew."""
        self._engine.reset_metrics()

    def reset_prefix_cache(self) -> None:
        """Forgets what past requests cached."""
        self._engine.reset_prefix_cache()

    def _run(self, ids: dict[Hashable, int], requests: Sequence[Request]) -> Iterator[Live]:
        """Runs requests to their ends. What is left when a step fails, or when nobody asks any more, is aborted."""
        left = {}
        try:
            for request_id, i in ids.items():
                self._engine.add_request(request_id, requests[i], self._seed(requests[i].params))
                left[request_id] = i
            while left:
                for live in self._engine.step():
                    if live.request_id not in ids:
                        self._unseen[live.request_id] = live
                    elif live.ended:
                        del left[live.request_id]
                        yield live
        finally:
            for request_id in left:
                self._engine.abort_request(request_id)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        options = self._engine.options
        return make_request(prompt, params, self.config, self.tokenizer, options.max_model_len, options.num_stop_ids)

    def _limit(self, max_model_len: int | None) -> int:
        own = self.config.max_position_embeddings
        if max_model_len is None:
            return min(own, 4096, self.config.index_topk or own)
        is_integer = isinstance(max_model_len, int) and not isinstance(max_model_len, bool)
        if not is_integer or not 2 <= max_model_len <= own:
            raise ValueError(f"max_model_len: got {max_model_len!r}, expected 2..{own} (the model's own limit)")
        self.config.check_context("max_model_len", max_model_len)
        return max_model_len

    def _seed(self, params: SamplingParams) -> int | None:
        if params.seed is not None or self._seeds is None:
            return params.seed
        return int(self._seeds.integers(2**63))

    def _output(self, live: Live, request_id: str) -> RequestOutput:
        stopped, ids, request = live.finish == Finish.STOP, list(live.token_ids), live.request
        completion = CompletionOutput(
            index=0,
            text="" if self.tokenizer is None else self.tokenizer.decode(ids[:-1] if stopped else ids),
            token_ids=ids,
            finish_reason=FINISH_REASONS.get(live.finish),
            stop_reason=ids[-1] if stopped and ids[-1] in request.params.stop_token_ids else None,
        )
        error = live.error or (NOT_FINITE if live.finish == Finish.ERROR else None)
        prompt_ids, metrics = list(request.token_ids), dataclasses.replace(live.metrics)
        return RequestOutput(request_id, request.text, prompt_ids, [completion], live.ended, metrics, error)


def _as_spec(given: SpeculativeConfig | dict[str, Any] | None) -> SpeculativeConfig:
    if given is None:
        return SpeculativeConfig(num_speculative_tokens=0)
    if isinstance(given, SpeculativeConfig):
        return given
    _check_names("speculative_config", given, SpeculativeConfig)
    return SpeculativeConfig(**given)


def _check_names(name: str, given: dict[str, Any], kind: type) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(given.keys() - fields)
    if unknown:
        raise ValueError(f"{name}: got unknown keys {unknown}, expected some of {sorted(fields)}")


def _failed(index: int, request: Request) -> RequestOutput:
    completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
    ids = list(request.token_ids)
    return RequestOutput(str(index), request.text, ids, [completion], True, Metrics(), request.error)


def _hidden(use_tqdm: bool | None) -> bool | None:
    return None if use_tqdm is None else not use_tqdm  # tqdm's None: hidden unless on a terminal
