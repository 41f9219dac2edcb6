"""The engine around the jitted programs: requests in, outputs and metrics out."""

from jaxspec.engine.engine import Engine, Live
from jaxspec.engine.llm import LLM, bundled_checkpoint
from jaxspec.engine.options import EngineConfig
from jaxspec.engine.outputs import CompletionOutput, Metrics, RequestOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Live",
    "Metrics",
    "RequestOutput",
    "bundled_checkpoint",
]
