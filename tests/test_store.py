"""Stores: bits equal to the checkpoint's on any mesh, conversions that are killed, and what is damaged.

Every conversion in this process is of RND in one form or another; the meshes have a process of their own.
"""

import json
import os
import shutil
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixtures import add_mtp_copies, rnd_config, rnd_tensors, write_folder, write_rnd, write_tokenizer

from jaxspec.checkpoint import (
    CheckpointError,
    convert,
    is_store,
    load,
    load_tokenizer,
    read_config,
    reader,
    restore,
    store,
)
from jaxspec.models.block_scaled import BlockScaled

BLOCK = [24, 40]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": BLOCK}


def write_fp8(path, **changes):
    """RND whose projections are in FP8 with random scales."""
    config, rng = rnd_config(quantization_config=FP8, **changes), np.random.default_rng(1)
    tensors = {}
    for name, x in rnd_tensors(config).items():
        if not name.endswith("_proj.weight") or "eh_proj" in name:
            tensors[name] = x if ".mlp.gate." in name else x.astype(ml_dtypes.bfloat16)
            continue
        grid = [-(-size // of) for size, of in zip(x.shape, BLOCK, strict=True)]
        tensors[name] = (x * 64).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = rng.uniform(0.5, 2, grid).astype(np.float32) / 64
    write_folder(path, config, tensors)
    return path


def write_own_copies(path):
    """RND whose MTP module has an embedding and a head of its own."""
    config, tensors = rnd_config(), rnd_tensors(rnd_config())
    add_mtp_copies(config, tensors)
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.3.{name}.weight"] += 1
    write_folder(path, config, tensors)
    return path


SOURCES = {
    "plain": lambda path: write_rnd(path, shards=3),
    "bfloat16": lambda path: write_rnd(path, dtype="bfloat16"),
    "three-modules": lambda path: write_rnd(path, num_nextn_predict_layers=3),
    "tied-dense": lambda path: write_rnd(
        path, tie_word_embeddings=True, first_k_dense_replace=3, num_nextn_predict_layers=0
    ),
    "own-copies": write_own_copies,
    "fp8": write_fp8,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    return {name: write(root / name) for name, write in SOURCES.items()}


@pytest.fixture
def source(sources):
    return sources["plain"]


@pytest.fixture
def made(tmp_path, source):
    """A store that a test may damage."""
    convert(source, tmp_path / "made")
    return tmp_path / "made"


def assert_same(params, expected):
    """Equal structure, dtypes and bits."""
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(*(np.asarray(a).view(f"u{a.dtype.itemsize}") for a in (x, y)))


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_store_holds_the_bits_of_its_source(tmp_path, sources, name, dtype):
    nbytes = convert(sources[name], tmp_path / "out", dtype=dtype)
    assert is_store(tmp_path / "out")
    assert not is_store(sources[name])
    config, params = load(tmp_path / "out")
    expected_config, expected = reader.load(sources[name], dtype)
    assert config == expected_config == read_config(tmp_path / "out")
    assert_same(params, expected)
    assert nbytes == sum(x.nbytes for x in jax.tree.leaves(params))
    assert not (tmp_path / "out.partial").exists()


def test_fp8_stays_fp8(tmp_path, sources):
    nbytes = convert(sources["fp8"], tmp_path / "out", weight_format="fp8")
    _, params = load(tmp_path / "out")
    _, expected = reader.load(sources["fp8"], weight_format="fp8")
    assert_same(params, expected)
    assert isinstance(params.moe.mlp.experts.gate, BlockScaled)
    assert nbytes == sum(x.nbytes for x in jax.tree.leaves(params))
    assert_same(load(tmp_path / "out", weight_format="fp8")[1], expected)
    with pytest.raises(CheckpointError, match="a store made with weight_format 'fp8', expected 'dequantized'"):
        load(tmp_path / "out", weight_format="dequantized")


def test_weights_are_cast_when_asked_only(tmp_path, sources):
    convert(sources["bfloat16"], tmp_path / "out")
    for dtype, widen in (("float16", True), ("float32", True), ("float32", False), ("bfloat16", False)):
        _, params = load(tmp_path / "out", dtype, widen=widen)
        assert_same(params, reader.load(sources["bfloat16"], dtype, widen=widen)[1])
    convert(sources["fp8"], tmp_path / "fp8", weight_format="fp8")
    _, params = restore(tmp_path / "fp8", jnp.float32)
    _, expected = reader.load(sources["fp8"], weight_format="fp8")
    widen = {jnp.dtype(jnp.bfloat16): jnp.float32}
    assert_same(params, jax.tree.map(lambda x: x.astype(widen.get(x.dtype, x.dtype)), expected))
    with pytest.raises(ValueError, match="dtype: got 'int8', expected one of"):
        restore(tmp_path / "out", "int8")


def test_what_goes_along(tmp_path, sources):
    shutil.copytree(sources["plain"], tmp_path / "in")
    write_tokenizer(tmp_path / "in", 128)
    (tmp_path / "in" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "in" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "in" / "generation_config.json").write_text('{"eos_token_id": [7]}')
    (tmp_path / "in" / "README.md").write_text("not this one")
    convert(tmp_path / "in", tmp_path / "out")
    names = "config.json generation_config.json tokenizer.json tokenizer_config.json chat_template.jinja".split()
    assert {file.name for file in (tmp_path / "out").iterdir()} == {*names, "jaxspec.json", "parts"}
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    assert read_config(tmp_path / "out").eos_token_ids == (7,)
    assert load_tokenizer(tmp_path / "out", 128).chat_template == "{{ messages }}"
    manifest = json.loads((tmp_path / "out" / "jaxspec.json").read_text())
    assert manifest["source"]["folder"] == "in"
    assert manifest["versions"].keys() == {"jaxspec", "jax", "orbax-checkpoint"}
    assert str(tmp_path) not in (tmp_path / "out" / "jaxspec.json").read_text()


class Reads:
    """Counts what a conversion reads, and raises when told to."""

    def __init__(self, monkeypatch):
        self.seen, self.last = [], None
        real = reader.Opened.read

        def read(opened, weight, layer=None, advance=None):
            if len(self.seen) == self.last:
                raise KeyboardInterrupt
            self.seen.append((weight.hf_name, weight.shape, layer))
            return real(opened, weight, layer, advance)

        monkeypatch.setattr(reader.Opened, "read", read)


def files_of(folder):
    """What was written where. Orbax names data files at random."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_dir() or file.parent == folder}


@pytest.mark.parametrize("last", [0, 1, 15, 40])
def test_a_killed_conversion_goes_on(tmp_path, source, monkeypatch, last):
    reads, partial = Reads(monkeypatch), tmp_path / "out.partial"
    convert(source, tmp_path / "whole")
    every, reads.seen, reads.last = reads.seen, [], last
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out")
    assert reads.seen == every[:last]
    assert not (tmp_path / "out").exists()
    for refused in (load, restore):
        with pytest.raises(CheckpointError, match=r"out\.partial: an unfinished conversion: repeat it to finish"):
            refused(partial)
    done = {part.name for part in (partial / "parts").glob("*")}
    reads.seen, reads.last = [], None
    convert(source, tmp_path / "out")
    parts = store._parts(reader.open_checkpoint(source).specs)
    left = [m for name, members in parts.items() if name not in done for m in members]
    assert reads.seen == [(m.weight.hf_name, m.weight.shape, m.layer) for m in left]
    assert len(reads.seen) < len(every) or last <= 1
    assert not partial.exists()
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert_same(load(tmp_path / "out")[1], load(tmp_path / "whole")[1])


def test_a_process_killed_while_a_part_is_written(tmp_path, source):
    """No handler runs then: what is left is the temporary folder of Orbax, which never counts as a part."""
    script = """if True:
        import os, sys, threading, time
        from pathlib import Path
        from jaxspec.checkpoint import convert
        def kill():
            while not list(Path(sys.argv[2] + ".partial").glob("parts/moe-00001*")):
                pass
            os._exit(9)
        threading.Thread(target=kill, daemon=True).start()
        convert(sys.argv[1], sys.argv[2])
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script, source, tmp_path / "out"], env=environment)
    assert done.returncode == 9
    with pytest.raises(CheckpointError, match="an unfinished conversion"):
        load(tmp_path / "out.partial")
    (tmp_path / "out.partial" / "parts" / "moe-00000.orbax-checkpoint-tmp-7").mkdir()
    convert(source, tmp_path / "out")
    assert {part.name for part in (tmp_path / "out" / "parts").iterdir()} == {
        "top", "dense-00000", "moe-00000", "moe-00001", "mtp-00000"
    }  # fmt: skip
    assert_same(load(tmp_path / "out")[1], reader.load(source)[1])


def test_killed_before_the_last_renaming(tmp_path, source, monkeypatch):
    """The folder is whole then, and says so."""
    rename = type(tmp_path).rename
    monkeypatch.setattr(type(tmp_path), "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out")
    monkeypatch.setattr(type(tmp_path), "rename", rename)
    assert_same(load(tmp_path / "out.partial")[1], reader.load(source)[1])
    reads = Reads(monkeypatch)
    convert(source, tmp_path / "out")
    assert reads.seen == []
    assert not (tmp_path / "out.partial").exists()


@pytest.fixture
def interrupted(tmp_path, source, monkeypatch):
    """`out.partial`, left by a conversion of a copy of the source that a test may change."""
    shutil.copytree(source, tmp_path / "in")
    with monkeypatch.context() as patch:
        Reads(patch).last = 20
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "in", tmp_path / "out")
    return tmp_path / "in"


def other_weights(folder):
    write_rnd(folder, num_nextn_predict_layers=0)


def other_shards(folder):
    write_rnd(folder, shards=2)


@pytest.mark.parametrize(
    ("change", "options", "key"),
    [
        (other_weights, {}, "config_digest|source|dtypes"),
        (other_shards, {}, "source"),
        (lambda folder: None, {"dtype": "bfloat16"}, "dtypes"),
    ],
)
def test_only_the_same_conversion_goes_on(tmp_path, interrupted, change, options, key):
    change(interrupted)
    with pytest.raises(
        CheckpointError, match=rf"out\.partial: left by a conversion with ({key}) .*, or remove the fo"
    ):
        convert(interrupted, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_another_version_does_not_go_on(tmp_path, interrupted, monkeypatch):
    monkeypatch.setattr(store.importlib.metadata, "version", lambda _: "9.9")
    with pytest.raises(CheckpointError, match=r"left by a conversion with versions .*'9\.9'"):
        convert(interrupted, tmp_path / "out")


def test_where_a_store_cannot_go(tmp_path, source, made):
    for taken in ("folder", "file"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match=f"{taken}: exists already: remove it, or convert"):
            convert(source, tmp_path / taken)
    with pytest.raises(CheckpointError, match="made: got a store, expected a Hugging Face checkpoint"):
        convert(made, tmp_path / "out")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").touch()
    with pytest.raises(CheckpointError, match=r"out\.partial: got files but no jaxspec\.json: remove the folder"):
        convert(source, tmp_path / "out")
    assert (tmp_path / "out.partial" / "mine").exists()
    with pytest.raises(CheckpointError, match="no such folder"):
        convert(tmp_path / "absent", tmp_path / "new")
    assert not list(tmp_path.glob("new*"))


def edit(**changes):
    def damage(made):
        file = made / "jaxspec.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def drop(pattern):
    def damage(made):
        for path in list(made.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def cut(pattern):
    def damage(made):
        largest = max(made.glob(pattern), key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])

    return damage


def edit_config(made):
    file = made / "config.json"
    file.write_text(file.read_text() + "\n")


DATA = "parts/moe-00001/**/d/*"
WHOLE = "copy the whole store, or convert the source again"
DAMAGE = {
    "part": (drop("parts/moe-00001"), rf"parts/moe-00001/.*: got none bytes, expected \d+: {WHOLE}"),
    "data": (drop(DATA), rf"parts/moe-00001/.*/d/\w+: got none bytes, expected \d+: {WHOLE}"),
    "cut": (cut(DATA), rf"parts/moe-00001/.*/d/\w+: got \d+ bytes, expected \d+: {WHOLE}"),
    "metadata": (drop("parts/top/state/_METADATA"), rf"parts/top/state/_METADATA: got none bytes, .*: {WHOLE}"),
    "version": (edit(format_version=2), r"jaxspec\.json: got format_version 2, expected 1: convert the source again"),
    "keys": (edit(more=1), r"jaxspec\.json: more: got 1, expected .*: convert the source again"),
    "kind": (edit(files=[]), r"jaxspec\.json: files: got \[\], expected .*: convert the source again"),
    "no files": (edit(files={}), r"jaxspec\.json: got weights or files of another model"),
    "unfinished": (edit(complete=False), r"made: an unfinished conversion: repeat it"),
    "dtypes": (edit(dtypes={"embed": "float32"}), r"jaxspec\.json: got weights or files of another model"),
    "dtype": (edit(dtypes={"embed": "int8"}), r"jaxspec\.json: got dtypes \['int8'\] and block"),
    "block": (edit(dtypes={"embed": "float8_e4m3fn"}), r"jaxspec\.json: got dtypes \[\] and block None, expected"),
    "not json": (lambda made: (made / "jaxspec.json").write_text("{"), r"jaxspec\.json: not valid JSON"),
    "config": (edit_config, r"config\.json: differs from the one that was converted: convert the source again"),
    "no config": (drop("config.json"), r"made: no config\.json"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(made, name):
    damage, message = DAMAGE[name]
    damage(made)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(made)
    assert "\n" not in str(caught.value)


def test_what_orbax_finds_is_named(made, monkeypatch):
    def fail(file, _):
        raise RuntimeError("checksum\nmismatch")

    monkeypatch.setattr(store.ocp, "load", fail)
    with pytest.raises(CheckpointError, match=r"parts/top: checksum mismatch: convert the source again"):
        load(made)


def test_a_conversion_holds_one_part_at_a_time(tmp_path, source, monkeypatch):
    real, alive, largest = reader.Opened.read, [], [0]

    def read(opened, weight, layer=None, advance=None):
        array = real(opened, weight, layer, advance)
        alive.append((weakref.ref(array.base), array.nbytes))
        largest[0] = max(largest[0], sum(nbytes for base, nbytes in alive if base() is not None))
        return array

    monkeypatch.setattr(reader.Opened, "read", read)
    convert(source, tmp_path / "out")
    _, params = load(tmp_path / "out")
    layer = sum(x.nbytes for x in jax.tree.leaves(params.mtp))
    assert layer // 2 < largest[0] <= layer


def test_restoring_holds_the_parameters_and_one_part(made, monkeypatch):
    before, peak, real = sum(x.nbytes for x in jax.live_arrays()), [0], store._place

    def place(part, *arguments):
        peak[0] = max(peak[0], sum(x.nbytes for x in jax.live_arrays()) - before)
        placed = real(part, *arguments)
        peak[0] = max(peak[0], sum(x.nbytes for x in jax.live_arrays()) - before)
        return placed

    monkeypatch.setattr(store, "_place", place)
    _, params = restore(made)
    whole, layer = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (params, params.mtp))
    assert whole < peak[0] <= whole + layer


def test_progress(tmp_path, source, capsys):
    for shown in (True, False):
        convert(source, tmp_path / f"out-{shown}", use_tqdm=shown)
        restore(tmp_path / f"out-{shown}", use_tqdm=shown)
        err = capsys.readouterr().err
        assert ("Converting: 100%" in err, "Restoring: 100%" in err) == (shown, shown)
        assert not shown or "1.17M/1.17M" in err


MESHES = """if True:
    import sys, warnings
    warnings.simplefilter("error")
    import jax, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from jaxspec.checkpoint import reader, restore
    from jaxspec.models.block_scaled import BlockScaled
    from jaxspec.models.params import param_specs
    assert jax.device_count() == 8
    is_scaled = lambda x: isinstance(x, BlockScaled)
    for shape, names in (((8,), ("model",)), ((2, 4), ("data", "model")), ((4, 2), ("expert", "model"))):
        mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
        size = dict(zip(names, shape))

        def sharding(weight):
            rules = {"vocab": "model", "heads": "model", "mlp": "model", "experts": "expert", "layers": "data"}
            axes = [rules.get(axis) if rules.get(axis) in names else None for axis in weight.axes]
            axes = [axis if axis and n % size[axis] == 0 else None for axis, n in zip(axes, weight.shape)]
            return NamedSharding(mesh, PartitionSpec(*axes))

        for source, made, kind in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
            config, params = restore(made, sharding=sharding)
            specs = param_specs(config)
            expected = reader.load(source, weight_format=kind)[1]
            assert jax.tree.structure(params) == jax.tree.structure(expected)
            for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(expected)):
                assert x.dtype == y.dtype
                one, other = (np.asarray(a).view(f"u{a.dtype.itemsize}") for a in (x, y))
                assert np.array_equal(one, other), (shape, source, x.shape)
            for weight, x in zip(jax.tree.leaves(specs), jax.tree.leaves(params, is_leaf=is_scaled)):
                values, scales = (x.codes, x.scales) if is_scaled(x) else (x, None)
                assert values.sharding.is_equivalent_to(sharding(weight), values.ndim)
                spec = sharding(weight).spec[: len(weight.stack)]
                stacked = NamedSharding(mesh, PartitionSpec(*spec))
                assert scales is None or scales.sharding.is_equivalent_to(stacked, scales.ndim)
            shards = {x.addressable_shards[0].data.nbytes / x.nbytes for x in jax.tree.leaves(params)}
            assert min(shards) <= 1 / 8 < 1 in shards, shards
"""


def test_restoring_onto_meshes(tmp_path, sources):
    convert(sources["plain"], tmp_path / "plain")
    convert(sources["fp8"], tmp_path / "fp8", weight_format="fp8")
    arguments = [sources["plain"], tmp_path / "plain", "dequantized", sources["fp8"], tmp_path / "fp8", "fp8"]
    flags = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
    }
    run = [sys.executable, "-c", MESHES, *arguments]
    done = subprocess.run(run, env=os.environ | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
