"""The text: sources of the running Python's standard library and the topics of its help system.

Library files make up the training text, but for 2% held out by a stable hash of their path. Where the tests are
installed too, they are further training text, without those of held-out modules.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from pydoc_data.topics import topics

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_PERCENT = 2
TESTS_UNTIL = 0.4
# Not prose of programmers: tables, generated text, third parties' files and build settings.
_SKIPPED = {"encodings", "idlelib", "lib2to3", "turtledemo", "site-packages", "pydoc_data", "__pycache__"}
_SKIPPED_FILES = {"html/entities.py", "stringprep.py"}
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Texts by path below the standard library's folder (help topics: `help/<topic>`)."""

    library: dict[str, str]
    tests: dict[str, str]
    held_out: dict[str, str]


def read_corpus() -> Corpus:
    """Reads and divides the text."""
    root = Path(sysconfig.get_path("stdlib"))
    library, tests, held_out = {}, {}, {}
    for path, text in _sources(root):
        if _is_test(path):
            tests[path] = text
        elif _is_held_out(path):
            held_out[path] = text
        else:
            library[path] = text
    library |= {f"help/{topic}": text for topic, text in sorted(topics.items())}
    names = {name for path in held_out for name in _module_names(path)}
    return Corpus(library, {path: text for path, text in tests.items() if not _tests_any(path, names)}, held_out)


def _sources(root: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        skipped = not _SKIPPED.isdisjoint(path.parts) or path.as_posix() in _SKIPPED_FILES
        if skipped or path.parts[0].startswith(_SKIPPED_PREFIXES):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # some tests are about other encodings
            continue
        if text.strip() and "\0" not in text:
            yield path.as_posix(), text


def _is_test(path: str) -> bool:
    return not {"test", "tests"}.isdisjoint(PurePosixPath(path).parts)


def _is_held_out(path: str) -> bool:
    return int.from_bytes(hashlib.sha1(path.encode()).digest()[:8]) % 100 < HELD_OUT_PERCENT


def _module_names(path: str) -> set[str]:
    """Every name by which a test may call this module: its own and its packages', without `_` and `_py`."""
    parts = set(PurePosixPath(path).with_suffix("").parts) - {"__init__", "__main__"}
    return {part.lstrip("_").removeprefix("py") or part for part in parts} | {part.lstrip("_") for part in parts}


def _tests_any(path: str, names: Iterable[str]) -> bool:
    prefixes = tuple(f"test_{name}" for name in names) + tuple(f"{name}tester" for name in names)
    return any(part.lstrip("_").startswith(prefixes) for part in PurePosixPath(path).parts)


def fit_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Int[np.ndarray, "n"]:
    """All texts in a row, each closed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = [[*encoding.ids, end] for encoding in tokenizer.encode_batch_fast(list(texts))]
    return np.concatenate([np.asarray(i, np.uint16) for i in ids]) if ids else np.zeros(0, np.uint16)


def schedule_windows(library_size: int, tests_size: int, rows: int, width: int, seed: int) -> Int[np.ndarray, "rows"]:
    """Starts of the training windows, in order, in the library's tokens followed by the tests'.

    Library and tests alternate for the first 40%, then the library, which is what the model is for, comes alone.
    Longer schedules only extend the alternation, so a run may be prolonged until then.
    """
    from_tests = np.arange(rows) % 2 == 1
    from_tests[int(TESTS_UNTIL * rows) :] = False
    from_tests &= tests_size > width
    library_rng, tests_rng = (np.random.default_rng([seed, stream]) for stream in (0, 1))
    starts = np.empty(rows, np.int64)
    starts[~from_tests] = _epochs(library_size, np.sum(~from_tests), width, library_rng)
    starts[from_tests] = library_size + _epochs(tests_size, np.sum(from_tests), width, tests_rng)
    return starts


def _epochs(size: int, count: int, width: int, rng: np.random.Generator) -> Int[np.ndarray, "count"]:
    """The first `count` starts of shuffled passes over `size` tokens, every pass cut at another offset."""
    passes = [np.zeros(0, np.int64)]
    while sum(map(len, passes)) < count:
        passes.append(rng.permutation(np.arange(rng.integers(width), size - width, width - 2)))
    return np.concatenate(passes)[:count]
