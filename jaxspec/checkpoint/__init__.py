"""Checkpoints: Hugging Face folders in and out, and their tokenizers."""

from jaxspec.checkpoint.files import CheckpointError
from jaxspec.checkpoint.reader import load
from jaxspec.checkpoint.tokenizer import Tokenizer, load_tokenizer
from jaxspec.checkpoint.writer import save_hf

__all__ = ["CheckpointError", "Tokenizer", "load", "load_tokenizer", "save_hf"]
