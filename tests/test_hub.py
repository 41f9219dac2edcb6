"""Models by name: `snapshot_download` is replaced throughout, for there is no network; the cache's layout is made."""

import os
import sys

import httpx2
import huggingface_hub
import jax
import numpy as np
import pytest
from fixtures import write_rnd, write_tokenizer
from huggingface_hub import errors

from jaxspec.checkpoint import CheckpointError, checkpoint_info, load, load_tokenizer
from jaxspec.checkpoint.hub import resolve

WANTED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "model-00001-of-00163.safetensors",
    "model.safetensors.index.json",
}
UNWANTED = {
    "README.md",
    "pytorch_model.bin",
    "modeling_deepseek.py",
    "consolidated.safetensors",
    "consolidated-00001-of-00002.safetensors",
    "original/model.safetensors",
    "onnx/config.json",
    "model.gguf",
}


class Hub:
    """Stands for `snapshot_download`: raises or returns what the test says, and records what it was asked."""

    def __init__(self, folder=None, fault=None, cached=None):
        self.folder, self.fault, self.cached, self.calls = folder, fault, cached, []

    def __call__(self, repo_id, **options):
        self.calls.append((repo_id, options))
        if options["local_files_only"]:
            if self.cached is None:
                raise errors.LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder")
            return str(self.cached)
        if self.fault is not None:
            raise self.fault
        return str(self.folder)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """`hub(...)`: the hub as the test wants it; the working folder is empty."""
    monkeypatch.chdir(tmp_path)

    def make(**options):
        made = Hub(**options)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", made)
        return made

    return make


def http_error(kind, status=404):
    request = httpx2.Request("GET", "https://huggingface.co/api/models/owner/name")
    return kind(f"{status} Client Error.\n\nNot here.", response=httpx2.Response(status, request=request))


@pytest.mark.parametrize(
    ("model", "repo", "revision"),
    [
        ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3", None),
        ("zai-org/GLM-4.7-Flash@main", "zai-org/GLM-4.7-Flash", "main"),
        ("a/b@refs/pr/3", "a/b", "refs/pr/3"),
        ("a_b/c.d-e@0123abc", "a_b/c.d-e", "0123abc"),
    ],
)
def test_a_repository_is_fetched(hub, tmp_path, model, repo, revision):
    made = hub(folder=tmp_path)
    assert resolve(model) == tmp_path
    [(asked, options)] = made.calls
    assert (asked, options["revision"]) == (repo, revision)


def test_only_what_is_read_is_fetched(hub, tmp_path):
    made = hub(folder=tmp_path)
    resolve("owner/name")
    [(_, options)] = made.calls
    patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
    found = set(huggingface_hub.utils.filter_repo_objects(sorted(WANTED | UNWANTED), **patterns))
    assert found == WANTED


@pytest.mark.parametrize("as_path", [False, True])
def test_a_folder_of_that_name_wins(hub, as_path):
    made = hub(fault=RuntimeError("asked"))
    os.makedirs("owner/name")
    given = os.path.join("owner", "name")
    assert str(resolve(resolve(given) if as_path else given)) == given
    assert made.calls == []


@pytest.mark.parametrize(
    "model", ["/absent", "absent", "./owner/name", "../owner/name", "a/b/c", "owner/", "a/b@", "~/m"]
)
def test_no_folder_and_no_name(hub, model):
    made = hub()
    with pytest.raises(CheckpointError, match="no such folder: expected a local one with config"):
        resolve(model)
    assert made.calls == []


def test_a_path_is_no_name(hub, tmp_path):
    made = hub(folder=tmp_path)
    with pytest.raises(CheckpointError, match="owner/name: no such folder"):
        resolve(type(tmp_path)("owner/name"))
    assert made.calls == []


UNREACHABLE = {
    "offline": errors.OfflineModeIsEnabled("Cannot reach: offline mode is enabled."),
    "no connection": httpx2.ConnectError("[Errno -2] Name or service not known"),
    "proxy": httpx2.ProxyError("407"),
    "not cached": errors.LocalEntryNotFoundError("An error happened\nwhile trying to locate the files"),
    "down": http_error(errors.HfHubHTTPError, 503),
    "disk": OSError(28, "No space left on device"),
}


@pytest.mark.parametrize("name", UNREACHABLE)
def test_the_cache_serves_when_the_hub_cannot(hub, tmp_path, name):
    made = hub(fault=UNREACHABLE[name], cached=tmp_path / "snapshot")
    assert resolve("owner/name@v1") == tmp_path / "snapshot"
    assert [options["local_files_only"] for _, options in made.calls] == [False, True]
    rest = [{key: value for key, value in options.items() if key != "local_files_only"} for _, options in made.calls]
    assert rest[0] == rest[1]
    assert rest[0]["revision"] == "v1"


@pytest.mark.parametrize("name", UNREACHABLE)
def test_neither_hub_nor_cache(hub, name):
    hub(fault=UNREACHABLE[name])
    with pytest.raises(CheckpointError, match=r"^owner/name: neither a folder nor") as caught:
        resolve("owner/name")
    message = str(caught.value)
    assert (
        f"whole in the hub's cache, and the hub cannot be reached: {' '.join(str(UNREACHABLE[name]).split())}"
        in message
    )
    assert message.endswith("`hf download` it, or download it elsewhere and pass the folder")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            errors.GatedRepoError,
            "owner/name: the hub gives access on request only: ask for it at https://huggingface",
        ),
        (errors.RepositoryNotFoundError, "owner/name: no such folder, nor a repository on the hub: check the name"),
        (errors.RevisionNotFoundError, "owner/name: got revision 'v9', expected a branch, tag or commit of it"),
    ],
)
def test_what_the_hub_refuses(hub, tmp_path, kind, message):
    """A snapshot in the cache does not stand in: the library has looked there before it raises the first two."""
    made = hub(fault=http_error(kind), cached=tmp_path)
    with pytest.raises(CheckpointError, match=message):
        resolve("owner/name@v9")
    assert len(made.calls) == 1


def test_without_fetching(hub, tmp_path):
    made = hub(folder=tmp_path, cached=tmp_path)
    assert resolve("owner/name", fetch=False) == tmp_path
    assert [options["local_files_only"] for _, options in made.calls] == [True]
    made = hub(folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"^owner/name: neither a folder .*, and only that was searched"):
        resolve("owner/name", fetch=False)


def test_describing_a_model_does_not_fetch_it(hub, tmp_path):
    made = hub(fault=RuntimeError("fetched"), cached=write_rnd(tmp_path / "rnd"))
    assert checkpoint_info("owner/name").path == str(tmp_path / "rnd")
    assert [options["local_files_only"] for _, options in made.calls] == [True]


def test_without_the_extra(hub, monkeypatch, tmp_path):
    hub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r'owner/name: no such folder, .*: pip install "jaxspec\[hub\]"'):
        resolve("owner/name")
    assert resolve(str(tmp_path)) == tmp_path


def test_the_library_itself_finds_its_cache_offline(tmp_path, monkeypatch):
    """The real `snapshot_download` on a cache made by hand, offline as all tests are: links are followed to blobs."""
    source = write_rnd(tmp_path / "source", shards=2)
    write_tokenizer(source, 128)
    cache, commit = tmp_path / "cache" / "models--owner--name", "0123456789abcdef0123456789abcdef01234567"
    for folder in ("blobs", f"snapshots/{commit}", "refs"):
        (cache / folder).mkdir(parents=True)
    for number, file in enumerate(sorted(source.iterdir())):
        (cache / "blobs" / f"{number:064x}").write_bytes(file.read_bytes())
        (cache / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{number:064x}")
    (cache / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = resolve("owner/name")
    assert folder == cache / "snapshots" / commit
    config, params = load(folder)
    expected_config, expected = load(source)
    assert config == expected_config
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert load_tokenizer(folder, 128).encode("5 7") == [5, 7]
    assert checkpoint_info(folder).usable
    with pytest.raises(CheckpointError, match="owner/other: neither a folder nor whole in the hub's cache"):
        resolve("owner/other")
