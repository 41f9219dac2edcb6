"""What every reader of a checkpoint folder shares: its error, files that may be opened, and strict JSON."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

# The limit of the safetensors format for its headers, and far beyond any config or index.
MAX_JSON_BYTES = 100_000_000


class CheckpointError(ValueError):
    """A checkpoint folder cannot be used. The message names the file, what it holds, what was expected, and what
    to do about it."""


def file_exists(file: Path) -> bool:
    """Whether a checkpoint has this file; it may be opened then.

    A file may be a symbolic link, but only to within the folder, or to the blobs that a snapshot in the hub's cache
    shares with others: a downloaded folder must not make this process read what its author could not. Devices and
    pipes, which can block for ever, are refused unopened.

    Raises:
        CheckpointError: it is a link that leads nowhere or out of the folder, or is no regular file.
    """
    if not os.path.lexists(file):
        return False
    target, folder = Path(os.path.realpath(file)), Path(os.path.realpath(file.parent))
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(Path(os.path.realpath(folder.parent.parent / "blobs")))
    if not any(target.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"{file}: got a link to {target}, expected a file in the folder, or in the blobs of a hub cache: copy "
            "the file into the folder if you trust it"
        )
    if not target.exists():
        raise CheckpointError(f"{file}: got a link to {target}, which does not exist: fetch the file again")
    if not stat.S_ISREG(target.stat().st_mode):
        raise CheckpointError(f"{file}: expected a regular file, got a folder, pipe or device: fetch the file again")
    return True


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: there is no such file, or it may not be opened (`file_exists`), or is larger than any
            checkpoint's; else as for `parse_json_object`.
    """
    if not file_exists(file):
        raise CheckpointError(f"{file}: no such file: fetch it")
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: got {size} bytes, expected JSON of {MAX_JSON_BYTES} at most: fetch it again")
    return parse_json_object(file.read_bytes(), str(file))


def parse_json_object(data: bytes, source: str) -> dict[str, Any]:
    """The object that some UTF-8 JSON spells.

    Raises:
        CheckpointError: it is not JSON, not an object, one object in it gives a key twice (of which readers differ
            in the one they take), a number is not finite, or an integer has more digits than Python converts.
    """
    try:
        parsed = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_float=_parse_float,
            parse_constant=_parse_float,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{source}: got JSON {type(parsed).__name__}, expected an object")
    return parsed


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice!r:.200} appears twice")
    return parsed


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is not a finite number")
    return value
