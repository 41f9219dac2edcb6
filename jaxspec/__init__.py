"""Speculative decoding for multi-head latent attention models in JAX.

`LLM` generates text. Below it lie pure functions: `load` gives configuration and parameters, `forward` runs the
paged model, `prefill` and `decode_round` advance a batch of rows, `generate` is the whole loop as one program.
"""

from jaxspec.devices import use_cpu_without_driver

use_cpu_without_driver()

from jaxspec.cache import KVCache
from jaxspec.checkpoint import load
from jaxspec.config import ModelConfig, SpeculativeConfig
from jaxspec.decoding import DecodeState, RoundInfo, decode_round, generate, init_state, prefill
from jaxspec.engine import LLM, RequestOutput
from jaxspec.models.dense import dense_forward
from jaxspec.models.primitives import apply_head
from jaxspec.models.transformer import Placement, forward
from jaxspec.sampling.params import SamplingParams, SamplingState

__all__ = [
    "LLM",
    "DecodeState",
    "KVCache",
    "ModelConfig",
    "Placement",
    "RequestOutput",
    "RoundInfo",
    "SamplingParams",
    "SamplingState",
    "SpeculativeConfig",
    "apply_head",
    "decode_round",
    "dense_forward",
    "forward",
    "generate",
    "init_state",
    "load",
    "prefill",
]
