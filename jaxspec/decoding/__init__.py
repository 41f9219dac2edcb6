"""Decoding: the state of a batch of rows, prefill, the round, and the loop over rounds."""

from jaxspec.decoding.loop import Generation, continue_generation, generate
from jaxspec.decoding.round import decode_round, prefill
from jaxspec.decoding.state import DecodeState, Finish, RoundInfo, init_state, pages_per_row

__all__ = [
    "DecodeState",
    "Finish",
    "Generation",
    "RoundInfo",
    "continue_generation",
    "decode_round",
    "generate",
    "init_state",
    "pages_per_row",
    "prefill",
]
