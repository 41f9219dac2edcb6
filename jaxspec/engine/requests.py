"""From what a user passes to validated requests; everything that can be refused is refused here, before compute."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.checkpoint import Tokenizer
from jaxspec.config import ModelConfig
from jaxspec.sampling.params import SamplingParams

Prompt = str | Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt, ready to run.

    Attributes:
        text: the prompt's text, if known.
        token_ids: its tokens.
        params: how to sample.
        stop_ids: tokens that end the output: the user's, and the model's own unless they are ignored.
        max_new_tokens: most tokens to generate, within the model's length.
        error: why it cannot run; the other fields then only describe it.
    """

    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    max_new_tokens: int = 0
    error: str | None = None


def as_prompts(prompts: Any) -> list[Prompt]:
    """A list of prompts, from one or several texts or lists of token ids.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(prompts, str) or (_is_ids(prompts) and len(prompts)):
        return [prompts]
    if isinstance(prompts, Sequence) and all(isinstance(p, str) or _is_ids(p) for p in prompts):
        return list(prompts)
    raise ValueError(
        "prompts: expected a text, a list of token ids, or a list of these, "
        f"got {type(prompts).__name__}: {prompts!r:.80}"
    )


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """One set of sampling parameters for each of `count` prompts.

    Raises:
        ValueError: a list of another length, or of other things.
    """
    params = SamplingParams() if params is None else params
    listed = list(params) if isinstance(params, Sequence) else [params] * count
    if len(listed) != count:
        raise ValueError(f"sampling_params: expected one or {count}, one for each prompt, got {len(listed)}")
    wrong = [p for p in listed if not isinstance(p, SamplingParams)]
    if wrong:
        raise ValueError(f"sampling_params: expected SamplingParams, got {wrong[0]!r:.80}")
    return listed


def make_request(
    prompt: Prompt,
    params: SamplingParams,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    max_model_len: int,
    num_stop_ids: int,
) -> Request:
    """Tokenises and checks one prompt. A fault is recorded in the request, so that the others can run."""
    try:
        ids = _tokenise(prompt, tokenizer)
        _check_ids(ids, config.vocab_size)
        room = _room(len(ids), params.max_tokens, max_model_len)
        stop_ids = _stop_ids(params, config, num_stop_ids)
    except ValueError as error:
        shown = prompt if isinstance(prompt, str) else None
        known = () if isinstance(prompt, str) else tuple(i for i in prompt if _is_int(i))
        return Request(shown, known, params, error=str(error))
    text = prompt if isinstance(prompt, str) else None if tokenizer is None else tokenizer.decode(ids)
    return Request(text, tuple(ids), params, stop_ids, room)


def _tokenise(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    if not isinstance(prompt, str):
        return [int(i) for i in prompt]
    if tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer.json: got a text, expected a list of token ids")
    try:
        return tokenizer.encode(prompt)
    except Exception as error:  # The library raises bare Exception, or TypeError for what is no valid Unicode.
        raise ValueError(f"the tokenizer refuses the prompt: got {prompt!r:.80}, expected text: {error}") from error


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if not ids:
        raise ValueError("the prompt is empty: got 0 tokens, expected at least 1")
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(f"token id outside the vocabulary: got {outside[0]}, expected 0..{vocab_size - 1}")


def _room(num_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """Tokens to generate at most."""
    room = max_model_len - num_tokens
    if room < 1:
        raise ValueError(
            f"the prompt leaves no room for output: got {num_tokens} tokens, expected fewer than max_model_len "
            f"{max_model_len}; shorten it or raise max_model_len"
        )
    if max_tokens is not None and max_tokens > room:
        raise ValueError(
            f"max_tokens: got {max_tokens} after a prompt of {num_tokens}, expected at most {room} within "
            f"max_model_len {max_model_len}; None generates as many as fit"
        )
    return room if max_tokens is None else max_tokens


def _stop_ids(params: SamplingParams, config: ModelConfig, most: int) -> tuple[int, ...]:
    outside = [i for i in params.stop_token_ids if i >= config.vocab_size]
    if outside:
        raise ValueError(
            f"stop token id outside the vocabulary: got {outside[0]}, expected 0..{config.vocab_size - 1}"
        )
    own = () if params.ignore_eos else config.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*params.stop_token_ids, *own)))
    if len(stop_ids) > most:
        raise ValueError(
            f"stop_token_ids: got {len(stop_ids)} with the model's own, expected at most num_stop_ids = {most}"
        )
    return stop_ids


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_ids(value: object) -> bool:
    return not isinstance(value, str) and hasattr(value, "__len__") and all(_is_int(i) for i in value)
