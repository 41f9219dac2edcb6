"""Models by name: folders of the Hugging Face hub's cache, fetched where they are not there yet."""

from __future__ import annotations

import os
import re
from pathlib import Path

from jaxspec.checkpoint.files import CheckpointError

# What a checkpoint has beside its weights.
DESCRIPTION = ("config.json", "generation_config.json", "tokenizer*.json", "chat_template.jinja")
# All that is ever read of a repository: pickled weights and code are not fetched.
PATTERNS = (*DESCRIPTION, "*.safetensors", "model.safetensors.index.json")
# The same weights again, as some repositories have them for other programs.
_SECOND_COPIES = ("*/*", "consolidated*")
# As the hub has it: an owner and a name of letters, digits, '-', '_' and '.'; then, here, a branch, tag or commit.
_REPOSITORY = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w][\w./-]*))?", re.ASCII)
_ELSEWHERE = "download it elsewhere and pass the folder"


def resolve(model: str | os.PathLike, *, fetch: bool = True) -> Path:
    """The local folder of a model: the given one where it exists, or else the repository of that name on the hub.

    A repository is fetched into the hub's own cache, and taken from there where it cannot be reached; only what can
    be used of it is fetched. This takes the extra: `pip install "jaxspec[hub]"`.

    Args:
        model: a folder, or `owner/name` or `owner/name@revision`.
        fetch: False looks in the cache only.

    Raises:
        CheckpointError: there is no such folder, and the model is no repository's name; or the repository cannot be
            had: the message names it and says what to do.
    """
    path = Path(model)
    if path.exists():
        return path
    found = _REPOSITORY.fullmatch(model) if isinstance(model, str) else None
    if found is None:
        raise CheckpointError(
            f"{path}: no such folder: expected a local one with config.json and safetensors, or owner/name or "
            "owner/name@revision of a model on the hub"
        )
    repo, revision = found["repo"], found["revision"]
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise CheckpointError(
            f'{repo}: no such folder, and it takes an extra to get it from the hub: pip install "jaxspec[hub]", or '
            f"{_ELSEWHERE}"
        ) from None
    return _fetch(repo, revision) if fetch else _find(repo, revision, "only that was searched")


def _fetch(repo: str, revision: str | None) -> Path:
    from huggingface_hub import errors

    try:
        return _snapshot(repo, revision, local_files_only=False)
    except errors.GatedRepoError as error:
        advice = f"ask for it at https://huggingface.co/{repo} and run `hf auth login`, or {_ELSEWHERE}"
        raise CheckpointError(f"{repo}: the hub gives access on request only: {advice}") from error
    except errors.RepositoryNotFoundError as error:
        advice = f"check the name, run `hf auth login` if it is private, or {_ELSEWHERE}"
        raise CheckpointError(f"{repo}: no such folder, nor a repository on the hub: {advice}") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo}: got revision {revision!r}, expected a branch, tag or commit of it") from error
    except Exception as error:  # The library hands on whatever its transports raise.
        return _find(repo, revision, f"the hub cannot be reached: {' '.join(str(error).split())}")


def _find(repo: str, revision: str | None, why_not_fetched: str) -> Path:
    try:
        return _snapshot(repo, revision, local_files_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{repo}: neither a folder nor whole in the hub's cache, and {why_not_fetched}: `hf download` it, or "
            f"{_ELSEWHERE}"
        ) from error


def _snapshot(repo: str, revision: str | None, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repo,
        revision=revision,
        allow_patterns=list(PATTERNS),
        ignore_patterns=list(_SECOND_COPIES),
        local_files_only=local_files_only,
    )
    return Path(folder)
