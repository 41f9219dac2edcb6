"""FP8 weights: exact dequantisation, what stays in FP8 and how it multiplies, and the parts that loading reads."""

import json
import math
import re
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from fixtures import rnd_config, rnd_tensors
from jax.sharding import NamedSharding, PartitionSpec
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from jaxspec.checkpoint import CheckpointError, load, reader
from jaxspec.checkpoint.quantization import dequantize_blocks, read_block_size
from jaxspec.checkpoint.reader import open_checkpoint
from jaxspec.models import block_scaled
from jaxspec.models.block_scaled import BlockScaled, dequantize, matmul, ragged

FP8, BF16, E8M0 = (np.dtype(getattr(ml_dtypes, x)) for x in ("float8_e4m3fn", "bfloat16", "float8_e8m0fnu"))
NAMES = {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "bfloat16": "BF16", "float32": "F32"}
# Neither divides the sizes of RND.
BLOCK = (24, 40)
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}


def write_safetensors(file: Path, tensors: dict) -> None:
    """Any dtype, which the library's NumPy front end cannot."""
    header, data = {}, b""
    for name, x in tensors.items():
        end = len(data) + x.nbytes
        header[name] = {"dtype": NAMES[x.dtype.name], "shape": x.shape, "data_offsets": [len(data), end]}
        data += x.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def is_quantized(name: str) -> bool:
    """As in released files: not gates, norms, embeddings, the head and eh_proj."""
    linear = name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))
    return linear and "eh_proj" not in name


def fp8_tensors(config: dict, scales=np.float32, block=BLOCK) -> dict:
    """RND in FP8 of arbitrary scales, and bfloat16."""
    rng, tensors = np.random.default_rng(1), {}
    for name, x in rnd_tensors(config).items():
        if not is_quantized(name):
            tensors[name] = x if ".mlp.gate." in name else x.astype(BF16)
            continue
        grid = tuple(-(-n // of) for n, of in zip(x.shape, block, strict=True))
        tensors[name] = (x * 64).astype(FP8)
        tensors[f"{name}_scale_inv"] = (rng.uniform(0.5, 2, grid) / 64).astype(np.float32).astype(scales)
    return tensors


def write_fp8(path: Path, change=None, scales=np.float32, **changes) -> Path:
    path.mkdir(parents=True)
    config = rnd_config(torch_dtype="bfloat16", quantization_config=QUANTIZATION | {}, **changes)
    tensors = fp8_tensors(config, scales)
    if change is not None:
        change(tensors)
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path / "model.safetensors", tensors)
    return path


def reference(values: np.ndarray, scales: np.ndarray, block: tuple, dtype) -> np.ndarray:
    """Element by element, as the format is defined."""
    i, j = np.indices(values.shape)
    of_element = scales.astype(np.float32)[i // block[0], j // block[1]]
    return (values.astype(np.float32) * of_element).astype(dtype)


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return np.where(np.isnan(x.astype(np.float32)), -1, x.view(f"u{x.dtype.itemsize}").astype(np.int64))


def leaves(params) -> list:
    return jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, BlockScaled))


# --- Dequantisation (field log g1) --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(576, 256), (1000, 320), (128, 128), (7, 300), (129, 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scales", ["float32", "bfloat16", "float8_e8m0fnu"])
@pytest.mark.parametrize("transposed", [False, True], ids=["straight", "transposed"])
def test_blocks_are_those_of_the_config(shape, dtype, scales, transposed):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, shape, np.uint8).view(FP8)
    grid = tuple(-(-n // 128) for n in shape)
    scale = np.exp2(rng.uniform(-9, 3, grid)).astype(np.float32).astype(scales)
    out = np.empty(shape[::-1], dtype).T if transposed else np.empty(shape, dtype)
    dequantize_blocks(values, scale.astype(np.float32), (128, 128), out)
    np.testing.assert_array_equal(bits(out), bits(reference(values, scale, (128, 128), dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scales", ["float32", "bfloat16", "float8_e8m0fnu"])
def test_every_value_is_that_of_transformers(dtype, scales):
    rng = np.random.default_rng(0)
    values = rng.permuted(np.tile(np.arange(256, dtype=np.uint8), (256, 2)), axis=1).view(FP8)
    scale = np.exp2(rng.uniform(-14, 14, (2, 4))).astype(np.float32).astype(scales)
    theirs = Fp8Dequantize(None)._dequantize_one(
        torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn),
        torch.from_numpy(scale.astype(np.float32)),
        dtype,
    )
    ours = np.empty(values.shape, str(dtype).removeprefix("torch."))
    dequantize_blocks(values, scale.astype(np.float32), (128, 128), ours)
    expected = theirs.view(torch.int16 if theirs.itemsize == 2 else torch.int32).numpy().view(ours.dtype)
    np.testing.assert_array_equal(bits(ours), bits(expected))
    w = BlockScaled(jnp.asarray(values.view(np.uint8)), jnp.asarray(scale, jnp.float32), (128, 128))
    on_device = dequantize(w, ours.dtype)
    normal = ~(np.abs(expected.astype(np.float32)) < 1e-4)
    np.testing.assert_array_equal(bits(on_device)[normal], bits(expected)[normal])


def test_every_power_of_two_is_read_as_a_scale():
    codes = np.arange(255, dtype=np.uint8)
    np.testing.assert_array_equal(codes.view(E8M0).astype(np.float32), np.exp2(codes.astype(np.float64) - 127))
    assert np.isnan(np.uint8([255]).view(E8M0).astype(np.float32))


# --- Loading ------------------------------------------------------------------------------------------------------


def expected_tensor(tensors: dict, name: str, dtype) -> np.ndarray:
    if not is_quantized(name):
        return tensors[name].astype(dtype)
    return reference(tensors[name], tensors[f"{name}_scale_inv"], BLOCK, dtype)


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("chunk", [None, 100], ids=["whole", "by rows"])
def test_every_weight_is_dequantized(tmp_path, monkeypatch, dtype, chunk):
    """With chunks of 100 bytes, no tensor is read at once."""
    if chunk:
        monkeypatch.setattr(reader, "_CHUNK_BYTES", chunk)
    path = write_fp8(tmp_path / "fp8")
    tensors, specs = fp8_tensors(rnd_config()), open_checkpoint(path).specs
    _, params = load(path, dtype)
    for weight, array in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True):
        wanted = np.dtype(weight.dtype or dtype or "bfloat16")
        assert array.dtype == wanted, weight.hf_name
        for index, name in weight.tensors():
            expected = weight.view(expected_tensor(tensors, name, wanted))
            np.testing.assert_array_equal(bits(np.asarray(array)[index]), bits(expected), err_msg=name)


@pytest.mark.parametrize("scales", ["bfloat16", "float8_e8m0fnu"])
def test_scales_of_other_dtypes(tmp_path, scales):
    path = write_fp8(tmp_path / "fp8", scales=scales)
    tensors = fp8_tensors(rnd_config(), scales)
    name = "model.layers.2.self_attn.o_proj.weight"
    np.testing.assert_array_equal(load(path)[1].moe.attn.o[1].T, expected_tensor(tensors, name, "bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_may_stay_in_fp8(tmp_path, dtype):
    path = write_fp8(tmp_path / "fp8")
    (_, kept), (_, spelled) = load(path, dtype, weight_format="fp8"), load(path, dtype)
    specs = jax.tree.leaves(open_checkpoint(path, weight_format="fp8").specs)
    for weight, ours, theirs in zip(specs, leaves(kept), leaves(spelled), strict=True):
        name = weight.hf_name
        assert isinstance(ours, BlockScaled) == (is_quantized(name) and "kv_b_proj" not in name), name
        assert ours.shape == theirs.shape
        np.testing.assert_array_equal(bits(dequantize(ours, theirs.dtype)), bits(theirs), err_msg=name)
    assert kept.moe.attn.o.block == BLOCK[::-1]
    stored = fp8_tensors(rnd_config())["model.layers.3.mlp.experts.5.down_proj.weight"]
    np.testing.assert_array_equal(kept.mtp.layer.mlp.experts.down[0, 5].codes.T, stored.view(np.uint8))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(kept))


def test_arrays_that_are_partly_in_fp8_are_dequantized(tmp_path):
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    def change(tensors):
        tensors[name] = expected_tensor(tensors, name, "bfloat16")
        del tensors[f"{name}_scale_inv"]

    (_, kept), (_, spelled) = (
        load(write_fp8(tmp_path / str(i), change), weight_format=form)
        for i, form in enumerate(("fp8", "dequantized"))
    )
    assert isinstance(kept.moe.mlp.experts.gate, BlockScaled)
    np.testing.assert_array_equal(kept.moe.mlp.experts.up, spelled.moe.mlp.experts.up)
    np.testing.assert_array_equal(
        spelled.moe.mlp.experts.up[0, 3].T, expected_tensor(fp8_tensors(rnd_config()), name, "bfloat16")
    )


def test_widening_changes_no_dequantized_weight(tmp_path):
    path = write_fp8(tmp_path / "fp8")
    (_, wide), (_, narrow) = load(path, "float32"), load(path, "float32", widen=False)
    assert narrow.embed.dtype == narrow.moe.attn_norm.dtype == jnp.bfloat16
    for a, b in zip(jax.tree.leaves(wide.moe.mlp), jax.tree.leaves(narrow.moe.mlp), strict=True):
        assert a.dtype == b.dtype == jnp.float32
        np.testing.assert_array_equal(a, b)


def test_fp8_needs_something_in_fp8(tmp_path):
    def change(tensors):
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            del tensors[name]
            weight = name.removesuffix("_scale_inv")
            tensors[weight] = tensors[weight].astype(BF16)

    path = write_fp8(tmp_path / "fp8", change)
    load(path)
    with pytest.raises(CheckpointError, match="got no matrix stored in F8_E4M3, expected some for weight_for"):
        load(path, weight_format="fp8")


@pytest.mark.usefixtures("unchecked_annotations")
def test_other_formats_are_refused(tmp_path):
    with pytest.raises(ValueError, match="weight_format: got 'int4', expected 'dequantized' or 'fp8'"):
        load(tmp_path, weight_format="int4")


def test_buffers_of_old_releases_are_not_read(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert load(write_fp8(tmp_path / "fp8", lambda tensors: tensors.update(extra)))[0].num_layers == 3


# --- Weights and scales that do not match --------------------------------------------------------------------------

NAME = "model.layers.1.mlp.experts.3.up_proj.weight"
MISMATCHES = {
    "no scale": (lambda x: x.pop(f"{NAME}_scale_inv"), f"{NAME}: got F8_E4M3, expected {NAME}_scale_inv beside it"),
    "no weight": (lambda x: x.pop(NAME), f"{NAME}_scale_inv: got no {NAME}, expected a weight in F8_E4M3"),
    "not FP8": (
        lambda x: x.update({NAME: x[NAME].astype(BF16)}),
        f"{NAME}_scale_inv: got {NAME} in bfloat16, expected a weight in F8_E4M3",
    ),
    "a scale of another size": (
        lambda x: x.update({f"{NAME}_scale_inv": np.ones((1, 1), np.float32)}),
        f"{NAME}_scale_inv: got float32 of shape (1, 1), expected shape (2, 2), for (32, 64) in blocks of (24, 40)",
    ),
    "a scale in FP8": (
        lambda x: x.update({f"{NAME}_scale_inv": np.ones((2, 2), FP8)}),
        f"{NAME}_scale_inv: got float8_e4m3fn of shape (2, 2), expected shape (2, 2)",
    ),
    "a vector": (
        lambda x: x.update({NAME: np.ones(32, FP8)}),
        f"{NAME}: got F8_E4M3 of shape (32,), expected a matrix",
    ),
    "a weight in e8m0": (
        lambda x: x.update({"model.norm.weight": np.ones(64, E8M0)}),
        "model.norm.weight: got F8_E8M0, which only scales can be",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MISMATCHES.values(), ids=MISMATCHES)
def test_weights_and_scales_must_match(tmp_path, change, message):
    path = write_fp8(tmp_path / "fp8", change)
    with pytest.raises(CheckpointError, match=re.escape(f"model.safetensors: {message}")):
        load(path)


def edit_quantization(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    merged = QUANTIZATION | changes
    config["quantization_config"] = {key: value for key, value in merged.items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "changes",
    [
        {"fmt": "absent", "scale_fmt": None},
        {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"], "ignored_layers": []},
    ],
)
def test_other_spellings_of_the_same_quantization(tmp_path, changes):
    path = write_fp8(tmp_path / "fp8")
    edit_quantization(path, **changes)
    load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "compressed-tensors"}, "quant_method: got 'compressed-tensors', expected one of ('fp8',)"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method: got 'gptq'"),
        ({"fmt": "e5m2"}, "fmt: got 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme: got 'static', expected one of ('dynamic', None)"),
        ({"scale_fmt": "int8"}, "scale_fmt: got 'int8'"),
        ({"weight_block_size": "absent"}, "weight_block_size: got None, expected [rows, columns] of a block"),
        ({"weight_block_size": [128]}, "weight_block_size: got [128]"),
        ({"weight_block_size": [0, 128]}, "weight_block_size: got [0, 128]"),
        ({"weight_block_size": [True, 1.0]}, "weight_block_size: got [True, 1.0]"),
        ({"kv_cache_scheme": {}}, "got keys this library does not know, ['kv_cache_scheme']"),
    ],
)
def test_other_quantizations_are_refused(tmp_path, changes, message):
    path = write_fp8(tmp_path / "fp8")
    edit_quantization(path, **changes)
    with pytest.raises(CheckpointError, match=re.escape(f"config.json: quantization_config: {message}")) as caught:
        load(path)
    assert "use the release in FP8 by blocks, or one in bfloat16" in str(caught.value)


def test_block_size():
    assert read_block_size({}) is read_block_size({"quantization_config": None}) is None
    assert read_block_size({"quantization_config": QUANTIZATION}) == BLOCK
    with pytest.raises(ValueError, match="quantization_config: got 'fp8', expected an object or null"):
        read_block_size({"quantization_config": "fp8"})


def test_fp8_without_a_config_of_it(tmp_path):
    path = write_fp8(tmp_path / "fp8")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    with pytest.raises(
        CheckpointError, match=r"config\.json: got no quantization_config, expected one, for model\.l"
    ):
        load(path)


# --- Parts, shardings and memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_format", ["dequantized", "fp8"])
def test_parts_are_slices_of_the_whole(tmp_path, weight_format):
    opened = open_checkpoint(write_fp8(tmp_path / "fp8"), weight_format=weight_format)
    read = []
    for weight in jax.tree.leaves(opened.specs):
        whole = opened.read(weight, advance=read.append)
        dtype, scaled = opened.target(weight)
        assert isinstance(whole, BlockScaled) == scaled
        assert whole.dtype == dtype
        assert whole.shape == weight.shape
        for layer in range(weight.shape[0] if weight.stack else 0):
            part, expected = opened.read(weight, layer), whole[layer]
            assert jax.tree.structure(part) == jax.tree.structure(expected)
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), part, expected)
    assert sum(read) == opened.nbytes


def assert_same(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), one, other)


@pytest.mark.parametrize("weight_format", ["dequantized", "fp8"])
def test_arrays_go_where_they_are_told(tmp_path, weight_format):
    path = write_fp8(tmp_path / "fp8")
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings = {}

    def sharding(weight):
        axes = ("model" if axis == "mlp" else None for axis in weight.axes)
        return shardings.setdefault(weight, NamedSharding(mesh, PartitionSpec(*axes)))

    _, params = load(path, weight_format=weight_format, sharding=sharding)
    assert_same(params, load(path, weight_format=weight_format)[1])
    for weight, array in zip(shardings, leaves(params), strict=True):
        assert (array.codes if isinstance(array, BlockScaled) else array).sharding == shardings[weight]


SHARDED = """
import jax, numpy as np, sys
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxspec.checkpoint import load
axes = {"mlp": "model", "heads": "model", "experts": "data"}
for kind, form in ((AxisType.Auto, "dequantized"), (AxisType.Explicit, "fp8")):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    place = lambda weight: NamedSharding(mesh, PartitionSpec(*(axes.get(axis) for axis in weight.axes)))
    _, there = load(sys.argv[1], weight_format=form, sharding=place)
    _, here = load(sys.argv[1], weight_format=form)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), there, here)
    gate = jax.tree.leaves(there.moe.mlp.experts.gate)[0]
    assert gate.addressable_shards[0].data.shape == (2, 4, 64, 16), gate.sharding
_, there = load(sys.argv[1], sharding=lambda weight: SingleDeviceSharding(jax.devices()[3]))
assert {d for x in jax.tree.leaves(there) for d in x.devices()} == {jax.devices()[3]}
"""


def test_four_devices(tmp_path):
    path = write_fp8(tmp_path / "fp8", first_k_dense_replace=0, num_hidden_layers=2, num_nextn_predict_layers=0)
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run([sys.executable, "-c", SHARDED, str(path)], env=flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_loading_compiles_nothing_and_copies_nothing(tmp_path, monkeypatch):
    """Arrays are taken over where they were filled."""
    path, addresses, compiled = write_fp8(tmp_path / "fp8"), [], []
    allocate = reader._aligned_empty

    def recorded(shape, dtype):
        array = allocate(shape, dtype)
        addresses.append(array.ctypes.data)
        return array

    monkeypatch.setattr(reader, "_aligned_empty", recorded)
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        _, params = load(path)
    finally:
        jax.monitoring.clear_event_listeners()
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)] == addresses
    assert [name for name in compiled if "compile" in name] == []


def test_loading_takes_little_more_than_the_arrays(tmp_path):
    changes = {"n_routed_experts": 16, "moe_intermediate_size": 512, "hidden_size": 256}
    path = write_fp8(tmp_path / "fp8", **changes)
    tracemalloc.start()
    _, params = load(path, "float32")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.1 * sum(x.nbytes for x in jax.tree.leaves(params))


@pytest.mark.parametrize("sizes", [(5, 3), (300, 200), (1000, 700)])
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_transposed_copies(monkeypatch, sizes, dtype):
    """By XLA and by NumPy, which a process without the CPU backend falls back to."""
    x = np.random.default_rng(0).integers(0, 255, (*sizes, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]
    for host in (reader._host_device(), None):
        monkeypatch.setattr(reader, "_host_device", lambda host=host: host)
        out = np.empty(sizes[::-1], dtype)
        reader._copy_bits(x, out.T)
        np.testing.assert_array_equal(bits(out), bits(np.ascontiguousarray(x.T)))


# --- Products -----------------------------------------------------------------------------------------------------


def random_block_scaled(shape: tuple, block: tuple, integers: bool = False) -> BlockScaled:
    rng = np.random.default_rng(0)
    grid = (*shape[:-2], *(-(-n // of) for n, of in zip(shape[-2:], block, strict=True)))
    values = rng.integers(-8, 9, shape) if integers else rng.standard_normal(shape)
    scales = np.exp2(rng.integers(-2, 3, grid)) if integers else rng.uniform(0.5, 2, grid)
    return BlockScaled(jnp.asarray(values.astype(FP8).view(np.uint8)), jnp.asarray(scales, jnp.float32), block)


@pytest.fixture(params=[1, 3000, 1 << 22], ids=["block by block", "tiles", "whole"])
def tile_elements(request, monkeypatch):
    monkeypatch.setattr(block_scaled, "_TILE_ELEMENTS", request.param)


@pytest.mark.usefixtures("tile_elements")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "block"), [((96, 200), (40, 24)), ((64, 96), (32, 32)), ((30, 7), (128, 128))])
def test_products(dtype, shape, block):
    w = random_block_scaled(shape, block)
    exact = dequantize(w, dtype)
    np.testing.assert_array_equal(matmul(jnp.eye(shape[0], dtype=dtype), w), exact)
    w = random_block_scaled(shape, block, integers=True)
    x = jnp.asarray(np.random.default_rng(1).integers(-4, 5, (2, 3, shape[0])), jnp.float32)
    np.testing.assert_array_equal(matmul(x, w), x @ dequantize(w, jnp.float32))
    np.testing.assert_array_equal(matmul(x, dequantize(w, "bfloat16")), x @ dequantize(w, jnp.float32))


@pytest.mark.usefixtures("tile_elements")
def test_ragged_products():
    w = random_block_scaled((3, 96, 200), (40, 24), integers=True)
    x = jnp.asarray(np.random.default_rng(1).integers(-4, 5, (7, 96)), jnp.float32)
    sizes, group = jnp.array([4, 0, 3], jnp.int32), np.repeat([0, 2], [4, 3])
    expected = np.einsum("ri,rio->ro", x, dequantize(w, jnp.float32)[group])
    np.testing.assert_array_equal(ragged(x, w, sizes), expected)
    np.testing.assert_array_equal(ragged(x, dequantize(w, "bfloat16"), sizes), expected)


@pytest.mark.usefixtures("tile_elements")
def test_stacks_are_scanned_and_indexed():
    w = random_block_scaled((4, 3, 64, 64), (32, 24), integers=True)
    x = jnp.arange(64, dtype=jnp.float32)[None] - 30
    expected = np.stack([x @ dequantize(w[i, i % 3], jnp.float32) for i in range(4)])

    @jax.jit
    def scanned(w):
        return jax.lax.scan(lambda i, layer: (i + 1, matmul(x, layer[i % 3])), 0, w)[1]

    @jax.jit
    def indexed(w):
        return jax.lax.map(lambda i: matmul(x, w[i, i % 3]), jnp.arange(4))

    np.testing.assert_array_equal(scanned(w), expected)
    np.testing.assert_array_equal(indexed(w), expected)
    assert (w[2].shape, w.ndim, w.dtype) == ((3, 64, 64), 4, FP8)
    with pytest.raises(IndexError, match="expected one of the 2 stacked axes"):
        w[0, 0, 0]


def ragged_in_scan(x, w):
    return jax.lax.scan(lambda i, layer: (i, ragged(x, layer[None], jnp.array([4], jnp.int32))), 0, w)[1]


PRODUCTS = {
    "scanned": lambda x, w: jax.lax.scan(lambda i, layer: (i, matmul(x, layer)), 0, w)[1],
    "indexed": lambda x, w: jax.lax.map(lambda i: matmul(x, w[i]), jnp.arange(3)),
    "ragged": ragged_in_scan,
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_no_matrix_is_spelled_out(product):
    """Neither in the program nor in what XLA makes of it."""
    w = random_block_scaled((3, 2048, 3072), (128, 128))
    lowered = jax.jit(product).lower(jnp.zeros((4, 2048), jnp.float32), w)
    for text in (lowered.as_text(), lowered.compile().as_text()):
        found = re.findall(r"\b(?:f32|bf16|f16)\[([\d,]+)\]|tensor<([\dx]+)x(?:f32|bf16|f16)>", text)
        largest = max(math.prod(int(n) for n in re.split("[,x]", hlo or mlir)) for hlo, mlir in found)
        assert 1_000_000 < largest < 2048 * 3072
