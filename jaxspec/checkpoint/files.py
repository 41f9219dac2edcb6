"""What every reader of a checkpoint folder shares: its error, and strict JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint folder cannot be used. The message names the file, what it holds, what was expected, and what
    to do about it."""


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: as for `parse_json_object`.
    """
    return parse_json_object(file.read_bytes(), str(file))


def parse_json_object(data: bytes, source: str) -> dict[str, Any]:
    """The object that some UTF-8 JSON spells.

    Raises:
        CheckpointError: it is not JSON, not an object, or one object in it gives a key twice (of which
            readers differ in the one they take).
    """
    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{source}: got JSON {type(parsed).__name__}, expected an object")
    return parsed


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)!r} appears twice")
    return parsed
