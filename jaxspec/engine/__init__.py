"""The engine around the jitted programs: requests in, outputs and metrics out."""

from jaxspec.engine.llm import LLM, bundled_checkpoint
from jaxspec.engine.outputs import CompletionOutput, Metrics, RequestOutput

__all__ = ["LLM", "CompletionOutput", "Metrics", "RequestOutput", "bundled_checkpoint"]
