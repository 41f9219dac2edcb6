"""Puts what a benchmark found between its marks in the README."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import jax

README = Path(__file__).parents[1] / "README.md"


def update(name: str, text: str) -> None:
    """Replaces what stands between the marks of benchmark `name`."""
    begin, end = f"<!-- {name}: made by benchmarks/{name}.py -->\n", f"<!-- /{name} -->"
    before, rest = README.read_text().split(begin)
    README.write_text(before + begin + text + end + rest.split(end, 1)[1])


def machine() -> str:
    """What figures were measured with and on."""
    return f"jax {jax.__version__} on {jax.default_backend()}, {os.cpu_count()} cores, {platform.machine()}"
