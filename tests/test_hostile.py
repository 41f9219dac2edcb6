"""Checkpoints from a stranger: nothing is opened, allocated or counted up to before it has been checked."""

import contextlib
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fixtures import rnd_config, write_rnd
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from sparse_v3 import NUM_SHARDS, write_v3_sparse

from jaxspec.checkpoint import CheckpointError, load
from jaxspec.checkpoint.files import parse_json_object
from jaxspec.checkpoint.reader import open_checkpoint, read_config
from jaxspec.checkpoint.shards import read_shard

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def refused(path: Path, *parts: str) -> None:
    """`load` must refuse, naming every part, before it has read or allocated anything of size."""
    started = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        load(path)
    for part in parts:
        assert part in str(caught.value), f"{part!r} not in: {caught.value}"
    # Only what counts to a billion takes longer.
    assert time.perf_counter() - started < 20


# --- Files that may be opened -------------------------------------------------------------------------------------


def hub_cache(root: Path, **options) -> Path:
    """A snapshot as huggingface_hub lays it out: links to blobs that are named by their hashes."""
    snapshot, blobs = root / "models--some--model/snapshots/0123abcd", root / "models--some--model/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(write_rnd(root / "plain", **options).iterdir())):
        file.rename(blobs / f"{i:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:040x}")
    return snapshot


@pytest.mark.parametrize("shards", [1, 3])
def test_snapshots_of_the_hub(tmp_path, shards):
    snapshot = hub_cache(tmp_path, shards=shards)
    assert load(snapshot)[0].num_layers == 3
    (tmp_path / "link").symlink_to(snapshot)
    assert load(tmp_path / "link")[0].num_layers == 3


def test_blobs_count_only_for_snapshots(tmp_path):
    snapshot = hub_cache(tmp_path)
    moved = snapshot.parent.parent / "elsewhere" / snapshot.name
    moved.parent.mkdir()
    snapshot.rename(moved)
    refused(moved, "config.json: got a link to", "expected a file in the folder, or in the blobs of a hub cache")


def test_links_within_the_folder(tmp_path):
    path = write_rnd(tmp_path / "rnd")
    (path / "data").mkdir()
    (path / SINGLE).rename(path / "data/weights")
    (path / SINGLE).symlink_to("data/weights")
    assert load(path)[0].num_layers == 3


FILES = ["config.json", "generation_config.json", SINGLE, INDEX, "model-00002-of-00003.safetensors"]


def checkpoint_with(path: Path, name: str) -> Path:
    write_rnd(path, shards=1 if name == SINGLE else 3)
    if name == "generation_config.json":
        (path / name).write_text("{}")
    return path / name


@pytest.mark.parametrize("name", FILES)
def test_links_out_of_the_folder(tmp_path, name):
    """To a valid file, so that nothing but the check can refuse it, and in a folder whose name begins like ours."""
    file = checkpoint_with(tmp_path / "rnd", name)
    outside = tmp_path / "rnd-outside"
    outside.mkdir()
    file.rename(outside / name)
    file.symlink_to(outside / name)
    refused(file.parent, f"{file}: got a link to {outside.resolve() / name}", "copy the file into the folder")
    file.unlink()
    file.symlink_to(f"../rnd-outside/{name}")
    refused(file.parent, f"{file}: got a link to")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling", "loop"])
def test_what_is_no_file(tmp_path, name, kind):
    """Opening a pipe would wait for a writer for ever."""
    file = checkpoint_with(tmp_path / "rnd", name)
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("nowhere" if kind == "dangling" else name)
    expected = "expected a regular file" if kind in ("pipe", "folder") else "got a link to"
    refused(file.parent, f"{file}: {expected}")


def test_device_in_place_of_a_shard(tmp_path):
    file = checkpoint_with(tmp_path / "rnd", SINGLE)
    file.unlink()
    file.symlink_to("/dev/zero")
    refused(file.parent, f"{file}: got a link to /dev/zero")


def test_file_that_shrinks_while_it_is_read(tmp_path):
    path = write_rnd(tmp_path / "rnd")
    opened = open_checkpoint(path)
    os.truncate(path / SINGLE, (path / SINGLE).stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: got \d+ bytes, expected \d+ at least"):
        opened.read(opened.specs.embed), opened.read(opened.specs.moe.attn.o)


# --- JSON ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": ' + "9" * 10_000 + "}",
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"a": ' * 100_000 + "1" + "}" * 100_000,
        '{"a": 1, "b": {"c": 1, "c": 1}}',
        '{"a": 1} x',
        "\ufeff{}",
    ],
    ids=range(9),
)
def test_json_that_readers_disagree_on(text):
    with pytest.raises(CheckpointError, match=r"^config\.json: not valid JSON: "):
        parse_json_object(text.encode(), "config.json")


def test_no_limit_in_tokenizers_is_a_number():
    """transformers writes it as model_max_length."""
    assert parse_json_object(b'{"a": 1000000000000000019884624838656}', "")["a"] == int(1e30)


def test_many_keys_are_compared_fast():
    text = "{" + ", ".join(f'"{i}": 1' for i in range(200_000)) + ', "199999": 1}'
    started = time.perf_counter()
    with pytest.raises(CheckpointError, match="key '199999' appears twice"):
        parse_json_object(text.encode(), "x")
    assert time.perf_counter() - started < 10


def test_endless_config(tmp_path):
    path = write_rnd(tmp_path / "rnd")
    os.truncate(path / "config.json", 10**12)
    refused(path, "config.json: got 1000000000000 bytes, expected JSON of 100000000 at most")


# --- config.json --------------------------------------------------------------------------------------------------

HUGE = [
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 10**30},
    {"num_hidden_layers": 10**9, "first_k_dense_replace": 10**9},
    {"num_nextn_predict_layers": 10**9},
    {"num_nextn_predict_layers": 10**30},
    {"n_routed_experts": 10**9},
    {"n_routed_experts": 10**30},
    {"n_shared_experts": 10**15},
    {"vocab_size": 10**15},
    {"hidden_size": 10**15},
    {"num_attention_heads": 10**9},
    {"kv_lora_rank": 10**30},
    {"num_hidden_layers": 150, "n_routed_experts": 25_000},
]


@pytest.mark.parametrize("changes", HUGE, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_sizes_that_nothing_stored_can_have(tmp_path, changes, tied):
    path = write_rnd(tmp_path / "rnd", tie_word_embeddings=tied)
    (path / "config.json").write_text(json.dumps(rnd_config(tie_word_embeddings=tied, **changes)))
    refused(path, str(path), "fetch")


def test_partly_fetched_checkpoints_name_a_missing_tensor(tmp_path):
    """Even where too many are missing to list them."""
    path = write_rnd(tmp_path / "rnd")
    tensors = load_file(path / SINGLE)
    save_file({name: tensors[name] for name in sorted(tensors)[:20]}, path / SINGLE)
    refused(path, f"got 20 tensors, expected {len(tensors)} by config.json, model.", "fetch the missing shards")


# --- Headers ------------------------------------------------------------------------------------------------------


def write_shard(file: Path, header, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


@pytest.mark.parametrize("size", [1, 0, 2**62])
def test_shape_of_a_million_axes(tmp_path, size):
    entry = {"dtype": "F32", "shape": [size] * 1_000_000, "data_offsets": [0, 4]}
    started = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"a: got header entry .*, expected dtype, shape \(of 8 axes at most\)"):
        read_shard(write_shard(tmp_path / SINGLE, {"a": entry}, bytes(4)))
    assert time.perf_counter() - started < 10


def test_header_of_the_whole_file(tmp_path):
    file = tmp_path / SINGLE
    file.write_bytes(struct.pack("<Q", 10**12))
    os.truncate(file, 10**12 + 8)
    with pytest.raises(CheckpointError, match="with a header of 1000000000000, expected a header that fits the file"):
        read_shard(file)


VALID = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [24, 32]},
    "c": {"dtype": "BF16", "shape": [2, 0], "data_offsets": [32, 32]},
    "d": {"dtype": "BF16", "shape": [1, 4], "data_offsets": [32, 40]},
}
DATA = np.random.default_rng(0).bytes(40)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 2, 8, 24, 40, 2**31, 2**63, 2**64 - 1, -1, 10**400]),
    st.floats(),
    st.sampled_from(["F32", "F64", "I64", "F8_E8M0", "BF16", "", "\ud800", "../x"]),
    st.lists(st.integers(-1, 2**64), max_size=12),
    st.just({}),
    st.just([[]]),
)


def damage_structure(draw) -> bytes:
    """A valid header with one to three entries changed."""
    header = json.loads(json.dumps(VALID))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(header) or ["a"]))
        entry = header.get(name)
        change = draw(st.sampled_from(["place", "drop", "copy", "replace", "field", "item", "swap"]))
        if change == "drop":
            header.pop(name, None)
        elif change == "copy":
            header[draw(st.text(max_size=3))] = entry
        elif change == "replace" or not isinstance(entry, dict) or "shape" not in entry:
            header[name] = draw(ODD)
        elif change == "place":
            entry["data_offsets"] = list(VALID[draw(st.sampled_from("abcd"))]["data_offsets"])
        elif change == "field":
            entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "other"]))] = draw(ODD)
        elif isinstance(items := entry.get(draw(st.sampled_from(["shape", "data_offsets"]))), list) and items:
            position = draw(st.integers(0, len(items) - 1))
            items[:] = items[::-1] if change == "swap" else [*items[:position], draw(ODD), *items[position + 1 :]]
    return json.dumps(header).encode()


def damage_text(draw, text: bytes) -> bytes:
    """An entry twice, or bytes replaced, inserted and dropped."""
    if draw(st.booleans()):
        name = draw(st.sampled_from("ab"))
        text = text[:-1] + f', "{name}": {json.dumps(VALID[name])}}}'.encode()
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.binary(max_size=3)) + text[at + draw(st.integers(0, 3)) :]
    return text


@st.composite
def damaged_files(draw) -> tuple[bytes, bytes]:
    """Header and file, damaged in one of the ways or in all."""
    ways = draw(st.sampled_from([{"structure"}, {"text"}, {"file"}, {"structure", "text", "file"}]))
    header = damage_structure(draw) if "structure" in ways else json.dumps(VALID).encode()
    header = damage_text(draw, header) if "text" in ways else header
    length, lost = len(header), 0
    if "file" in ways:
        length = draw(st.just(length) | st.integers(0, 2**64 - 1))
        lost = draw(st.sampled_from([0, -8, -24, 1, 8, 40, 48]))
    whole = struct.pack("<Q", length) + header + DATA
    return header, whole[: len(whole) - lost] if lost > 0 else whole + bytes(-lost)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(damaged_files())
def test_damage_is_refused_or_harmless(tmp_path_factory, damaged):
    """What is not refused lies within the file, and no two tensors share a byte."""
    file = tmp_path_factory.getbasetemp() / SINGLE
    header, whole = damaged
    file.write_bytes(whole)
    try:
        tensors = read_shard(file)
    except CheckpointError:
        return
    data = file.read_bytes()[8 + len(header) :]
    in_order = sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes))
    assert b"".join(tensor.read().tobytes() for tensor in in_order) == data


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(sorted(rnd_config())), ODD, min_size=1, max_size=3))
def test_config_of_odd_values(tmp_path_factory, changes):
    folder = tmp_path_factory.getbasetemp() / "odd"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(rnd_config() | changes))
    with contextlib.suppress(CheckpointError):
        read_config(folder)


# --- The largest release ------------------------------------------------------------------------------------------


OPEN_V3 = """
import sys
from pathlib import Path
from jaxspec.checkpoint import shards
from jaxspec.checkpoint.reader import open_checkpoint
lengths, read_into = [], shards.read_into
def counted(file, offset, buffer):
    lengths.append(len(buffer))
    read_into(file, offset, buffer)
shards.read_into = counted
folder = Path(sys.argv[1])
opened = open_checkpoint(folder, weight_format="fp8")
prefixes = [file.open("rb").read(8) for file in folder.glob("*.safetensors")]
headers = [int.from_bytes(prefix, "little") for prefix in prefixes]
assert sorted(lengths) == sorted([8] * 163 + headers), "more than headers was read"
assert (opened.config.num_layers, opened.config.num_mtp_layers) == (61, 1)
experts, attention = opened.specs.moe.mlp.experts, opened.specs.moe.attn
assert experts.gate.shape == (58, 256, 7168, 2048)
assert opened.target(experts.gate)[1] and not opened.target(attention.k_up)[1]
assert 680e9 < opened.nbytes < 690e9
lengths.clear()
last = opened.read(attention.q_a, 57)
assert last.shape == (7168, 1536) and last.scales.shape == (56, 12)
assert sum(lengths) == 7168 * 1536 + 56 * 12 * 4, "more than one layer was read"
"""


def test_a_large_release_opens_from_its_headers(tmp_path):
    """Of 690 GB two reads for each shard, its header's length and its header; and then one layer's matrix alone.

    In a process of its own, for checking every annotation of 91,989 tensors takes a minute.
    """
    folder = write_v3_sparse(tmp_path / "v3", mtp_copies=False)
    assert len(list(folder.glob("*.safetensors"))) == NUM_SHARDS == 163
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", OPEN_V3, str(folder)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
