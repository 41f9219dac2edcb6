"""Decoding: the state of a batch of rows, prefill, the round, and the loop over rounds."""

from jaxspec.decoding.loop import Generation, continue_generation, generate
from jaxspec.decoding.round import decode_round, prefill, prefill_chunk
from jaxspec.decoding.serving import Serving, StepInfo, admit, serve_prompts, serve_rounds, serving_faults, vacate
from jaxspec.decoding.state import DecodeState, Finish, RoundInfo, init_state, pages_per_row

__all__ = [
    "DecodeState",
    "Finish",
    "Generation",
    "RoundInfo",
    "Serving",
    "StepInfo",
    "admit",
    "continue_generation",
    "decode_round",
    "generate",
    "init_state",
    "pages_per_row",
    "prefill",
    "prefill_chunk",
    "serve_prompts",
    "serve_rounds",
    "serving_faults",
    "vacate",
]
