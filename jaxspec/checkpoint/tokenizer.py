"""The checkpoint's own tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from jaxspec.checkpoint.files import CheckpointError, file_exists, read_json_object


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A `tokenizer.json` as it is: class names in tokenizer_config.json change nothing.

    Attributes:
        backend: the tokenizer of the tokenizers library.
        chat_template: Jinja source, or None. It is not rendered here.
    """

    backend: tokenizers.Tokenizer
    chat_template: str | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text.
            add_special_tokens: add what the tokenizer's post-processor adds (a BOS, say). False for a rendered chat
                template, which spells these tokens out.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)


def load_tokenizer(path: str | Path, vocab_size: int) -> Tokenizer | None:
    """Loads the tokenizer of a checkpoint folder; None when it has no `tokenizer.json`.

    Args:
        path: local folder.
        vocab_size: the model's. A tokenizer may have fewer ids, for models pad their vocabulary.

    Raises:
        CheckpointError: a file cannot or may not be read, or the tokenizer has ids outside the model's vocabulary.
    """
    file = Path(path) / "tokenizer.json"
    if not file_exists(file):
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises bare Exception for every fault of the file.
        raise CheckpointError(f"{file}: not a tokenizer.json: {error}: fetch the file again") from error
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocab_size:
        raise CheckpointError(
            f"{file}: a tokenizer that does not match the vocabulary: got ids up to {highest}, expected less than "
            f"vocab_size {vocab_size} of config.json: fetch both from one revision"
        )
    return Tokenizer(backend, read_chat_template(Path(path)))


def read_chat_template(folder: Path) -> str | None:
    """Jinja source of `chat_template.jinja`, else of the (default) template in tokenizer_config.json; None without.

    Transformers looks in the same places in the same order.

    Raises:
        CheckpointError: a file cannot or may not be read (`file_exists`), or the template is no text.
    """
    if file_exists(folder / "chat_template.jinja"):
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    file = folder / "tokenizer_config.json"
    template = read_json_object(file).get("chat_template") if file_exists(file) else None
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{file}: chat_template: got {type(template).__name__}, expected text")
    return template
