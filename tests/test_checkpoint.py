"""Checkpoint folders: exact bits in, everything accounted for, and an error that says what to do."""

import json
import re
import struct
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
import torch
from fixtures import (
    rnd_config,
    rnd_tensors,
    write_cyc,
    write_rnd,
)
from safetensors.numpy import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from jaxspec import KVCache, Placement
from jaxspec import forward as paged_forward
from jaxspec.checkpoint import CheckpointError, load, load_tokenizer, save_hf
from jaxspec.checkpoint.shards import read_shard
from jaxspec.config import ModelConfig
from jaxspec.models.dense import dense_forward
from jaxspec.models.params import param_specs

INDEX = "model.safetensors.index.json"
forward = jax.jit(dense_forward, static_argnums=1)


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(path: Path, change) -> None:
    """Rewrites model.safetensors after `change` has edited the dictionary of tensors."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def bits(array) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def assert_equal_bits(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


def refused(path: Path, *parts: str, **options) -> None:
    """`load` must refuse, naming every part."""
    with pytest.raises(CheckpointError) as caught:
        load(path, **options)
    for part in parts:
        assert part in str(caught.value), f"{part!r} not in: {caught.value}"


# --- What is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_stored_bit_arrives(tmp_path, dtype, shards):
    _, params = load(write_rnd(tmp_path / "rnd", dtype=dtype, shards=shards))
    stored = {name: x if ".mlp.gate." in name else x.astype(dtype) for name, x in rnd_tensors(rnd_config()).items()}
    moe, mtp = params.moe, params.mtp
    expected = {
        "model.embed_tokens.weight": params.embed,
        "lm_head.weight": np.asarray(params.head).T,
        "model.norm.weight": params.norm,
        "model.layers.0.mlp.down_proj.weight": np.asarray(params.dense.mlp.down)[0].T,
        "model.layers.2.self_attn.q_a_proj.weight": np.asarray(moe.attn.q_a)[1].T,
        "model.layers.2.self_attn.q_a_layernorm.weight": np.asarray(moe.attn.q_a_norm)[1],
        "model.layers.1.mlp.experts.5.up_proj.weight": np.asarray(moe.mlp.experts.up)[0, 5].T,
        "model.layers.2.mlp.shared_experts.gate_proj.weight": np.asarray(moe.mlp.shared.gate)[1].T,
        "model.layers.2.mlp.gate.weight": np.asarray(moe.mlp.router)[1].T,
        "model.layers.1.mlp.gate.e_score_correction_bias": np.asarray(moe.mlp.router_bias)[0],
        "model.layers.3.eh_proj.weight": np.asarray(mtp.eh_proj)[0].T,
        "model.layers.3.shared_head.norm.weight": np.asarray(mtp.norm)[0],
        "model.layers.3.mlp.experts.7.gate_proj.weight": np.asarray(mtp.layer.mlp.experts.gate)[0, 7].T,
    }
    for name, array in expected.items():
        assert array.dtype == stored[name].dtype, name
        np.testing.assert_array_equal(bits(array), bits(stored[name]), err_msg=name)
    up = stored["model.layers.1.self_attn.kv_b_proj.weight"].reshape(4, 32, 32)
    np.testing.assert_array_equal(bits(np.asarray(moe.attn.k_up)[0]), bits(up[:, :16]))
    np.testing.assert_array_equal(bits(np.asarray(moe.attn.v_up)[0]), bits(up[:, 16:].swapaxes(1, 2)))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))


def test_cast_happens_on_the_way(tmp_path):
    path = write_rnd(tmp_path / "rnd")
    (_, full), (_, half) = load(path), load(path, dtype=jnp.bfloat16)
    fixed = {id(x) for x in (half.moe.mlp.router, half.moe.mlp.router_bias)} | {
        id(x) for x in (half.mtp.layer.mlp.router, half.mtp.layer.mlp.router_bias)
    }
    for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(half), strict=True):
        assert b.dtype == (jnp.float32 if id(b) in fixed else jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(a).astype(b.dtype), b)


@pytest.mark.parametrize("dtype", ["float64", "int8", "fp9", object(), "float8_e4m3fn"])
def test_other_dtypes_are_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match=r"dtype: got .*, expected one of bfloat16, float16, float32"):
        load(write_rnd(tmp_path / "rnd"), dtype=dtype)


def test_router_stored_in_bfloat16_becomes_float32(tmp_path):
    """As released files have it."""
    path = write_rnd(tmp_path / "rnd", dtype="bfloat16")
    name = "model.layers.1.mlp.gate.weight"
    edit_tensors(path, lambda tensors: tensors.update({name: tensors[name].astype(ml_dtypes.bfloat16)}))
    _, params = load(path)
    assert params.moe.mlp.router.dtype == jnp.float32
    stored = load_file(path / "model.safetensors")[name]
    np.testing.assert_array_equal(params.moe.mlp.router[0], stored.astype(np.float32).T)


def test_several_dtypes_need_a_choice(tmp_path):
    path = write_rnd(tmp_path / "rnd", dtype="bfloat16")
    edit_tensors(path, lambda x: x.update({"model.norm.weight": x["model.norm.weight"].astype(np.float32)}))
    refused(path, "float32", "bfloat16", "model.norm.weight", "expected one dtype: pass dtype")
    _, params = load(path, dtype="float32")
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_reads_what_transformers_writes(tmp_path):
    """New key form; and, as transformers drops the MTP layer but not its key, the error that says so."""
    torch.manual_seed(0)
    known = {key: value for key, value in rnd_config().items() if key not in ("scoring_func", "topk_method")}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**known)).eval()
    model.save_pretrained(tmp_path)
    refused(tmp_path, "promises MTP", "set num_nextn_predict_layers to 0 in config.json")
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=0)
    config, params = load(tmp_path)
    tokens = np.arange(30).reshape(2, 15)
    with torch.no_grad():
        expected = model(torch.as_tensor(tokens), use_cache=False).logits.numpy()
    np.testing.assert_allclose(forward(params, config, jnp.asarray(tokens)).logits, expected, atol=1e-4, rtol=0)


def test_generation_config_gives_eos(tmp_path):
    """Field log g13: a list, and not the tokenizer's single id."""
    path = write_rnd(tmp_path / "rnd", eos_token_id=7)
    assert load(path)[0].eos_token_ids == (7,)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert load(path)[0].eos_token_ids == (2, 5)


def test_loading_makes_no_second_copy(tmp_path):
    """Neither for a cast nor to compare the copies of an MTP module. The embedding is nearly the whole model."""
    path = write_rnd(
        tmp_path / "rnd", vocab_size=200_000, dtype="bfloat16", tie_word_embeddings=True, mtp_copies=True
    )
    tracemalloc.start()
    _, params = load(path, dtype="float32")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * params.embed.nbytes


# --- Round trip ---------------------------------------------------------------------------------------------------


def random_params(config: ModelConfig, dtype, own: bool):
    """Random parameters, with embeddings and heads of the MTP modules' own where asked."""
    rng = np.random.default_rng(0)
    specs = param_specs(config, own_mtp_embed=own, own_mtp_head=own)
    return jax.tree.map(lambda w: jnp.asarray(rng.standard_normal(w.shape), w.dtype or dtype), specs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None, "attention_bias": True},
        {"tie_word_embeddings": True},
        {"num_nextn_predict_layers": 3},
        {"num_nextn_predict_layers": 0, "first_k_dense_replace": 3},
        {"first_k_dense_replace": 0, "qk_nope_head_dim": 24, "v_head_dim": 20},
    ],
    ids=["plain", "uncompressed and biased", "tied", "three modules", "dense", "uneven"],
)
@pytest.mark.parametrize("own", [False, True], ids=["trunk's head", "own head"])
def test_save_and_load_keep_every_bit(tmp_path, changes, dtype, own):
    config = ModelConfig.from_hf(rnd_config(eos_token_id=[2, 5], **changes))
    params = random_params(config, dtype, own)
    save_hf(tmp_path / "saved", config, params, dtype)
    again, loaded = load(tmp_path / "saved")
    assert again == config
    assert_equal_bits(loaded, params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 1}, r"model\.embed_tokens\.weight: got shape \(1, 64\), expected \(128, 64\)"),
        ({"num_nextn_predict_layers": 0}, "mtp"),
    ],
    ids=["a shape that would broadcast", "no MTP module"],
)
def test_saving_under_another_config_is_refused(tmp_path, changes, message):
    config, _ = load(write_rnd(tmp_path / "rnd"))
    _, params = load(write_rnd(tmp_path / "other", **changes))
    with pytest.raises(ValueError, match=message):
        save_hf(tmp_path / "saved", config, params)
    assert not (tmp_path / "saved").exists()


# --- MTP modules (field log g4, g5) -------------------------------------------------------------------------------


def acceptance(path: Path) -> float:
    """Share of first drafts that are the greedy token, over counted text."""
    config, params = load(path)
    out = forward(params, config, jnp.arange(40)[None])
    return float(np.mean(np.argmax(out.mtp_logits[0, 0, :-1], -1) == np.argmax(out.logits[0, 1:], -1)))


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("mtp_copies", [False, True], ids=["no copies", "copies"])
def test_drafts_are_right_with_and_without_copies(tmp_path, tied, mtp_copies):
    path = write_cyc(tmp_path / "cyc", "hit", tied=tied, mtp_copies=mtp_copies)
    names = load_file(path / "model.safetensors").keys()
    assert ("model.layers.3.embed_tokens.weight" in names) == mtp_copies
    _, params = load(path)
    assert params.mtp.embed is None
    assert params.mtp.head is None
    assert acceptance(path) == 1.0


@pytest.mark.parametrize("kind", ["embed_tokens.weight", "shared_head.head.weight"])
def test_copies_that_differ_are_used(tmp_path, kind):
    """Permuted by one, and undone by eh_proj: right drafts only where the copy is used and is used rightly."""
    path = write_cyc(tmp_path / "cyc", "hit", mtp_copies=True)

    def permute(tensors):
        at = "model.layers.3."
        tensors[at + kind] = np.roll(tensors[at + kind], 1, axis=0)
        axis, shift = (1, -1) if kind == "embed_tokens.weight" else (0, -1)
        eh_proj = tensors[at + "eh_proj.weight"]
        eh_proj[:, :64] = np.roll(eh_proj[:, :64], shift, axis=axis)

    edit_tensors(path, permute)
    _, params = load(path)
    assert (params.mtp.embed is None) == (kind != "embed_tokens.weight")
    assert (params.mtp.head is None) == (kind != "shared_head.head.weight")
    assert acceptance(path) == 1.0
    edit_tensors(path, lambda tensors: tensors.pop("model.layers.3." + kind))
    assert acceptance(path) == 0.0


def test_one_differing_copy_keeps_them_all(tmp_path):
    path = write_rnd(tmp_path / "rnd", num_nextn_predict_layers=2, mtp_copies=True)
    edit_tensors(path, lambda x: x["model.layers.4.embed_tokens.weight"].__setitem__((100, 7), 5.0))
    _, params = load(path)
    assert params.mtp.embed.shape == (2, 128, 64)
    assert params.mtp.head is None
    np.testing.assert_array_equal(params.mtp.embed[0], params.embed)
    assert params.mtp.embed[1, 100, 7] == 5.0


@pytest.mark.parametrize("kind", ["embed_tokens.weight", "shared_head.head.weight"])
def test_copies_of_some_modules_are_refused(tmp_path, kind):
    path = write_rnd(tmp_path / "rnd", num_nextn_predict_layers=2, mtp_copies=True)
    edit_tensors(path, lambda x: x.pop(f"model.layers.3.{kind}"))
    refused(path, "got 1 of the 2 MTP modules' copies", "expected all or none", f"model.layers.3.{kind} missing")


def test_modules_are_found_by_depth(tmp_path):
    config, params = load(write_rnd(tmp_path / "rnd", num_hidden_layers=5, num_nextn_predict_layers=2))
    assert (config.num_layers, config.num_mtp_layers) == (5, 2)
    stored = rnd_tensors(rnd_config(num_hidden_layers=5, num_nextn_predict_layers=2))
    np.testing.assert_array_equal(params.mtp.enorm[1], stored["model.layers.6.enorm.weight"])


def test_promised_modules_that_are_not_stored(tmp_path):
    path = write_rnd(tmp_path / "rnd", num_nextn_predict_layers=0)
    edit_json(path / "config.json", num_nextn_predict_layers=1)
    refused(
        path,
        "config.json promises MTP (num_nextn_predict_layers 1) but no MTP tensor is stored",
        "expected from model.layers.3 on",
        "set num_nextn_predict_layers to 0 in config.json to do without, or fetch the missing shards",
    )
    edit_json(path / "config.json", num_nextn_predict_layers=0)
    assert load(path)[1].mtp is None


def test_stored_modules_that_are_not_promised(tmp_path):
    path = write_rnd(tmp_path / "rnd", num_nextn_predict_layers=2)
    edit_json(path / "config.json", num_nextn_predict_layers=1)
    refused(path, "no part of the model", "model.layers.4.eh_proj.weight", "num_nextn_predict_layers")
    edit_json(path / "config.json", num_nextn_predict_layers=3)
    refused(path, "expected tensors are not stored", "model.layers.5.eh_proj.weight")


# --- Tied embeddings ----------------------------------------------------------------------------------------------


def test_tied_head_may_be_stored_when_equal(tmp_path):
    """Compared to the last element: the head is larger than the blocks it is compared by."""
    path = write_rnd(tmp_path / "rnd", tie_word_embeddings=True, vocab_size=20_000)
    edit_tensors(path, lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"].copy()}))
    assert load(path)[1].head is None
    edit_tensors(path, lambda x: x["lm_head.weight"].__setitem__((-1, -1), 5.0))
    refused(path, "lm_head.weight that differs from model.embed_tokens.weight", "tie_word_embeddings true")


def test_tied_head_of_another_shape_is_refused(tmp_path):
    path = write_rnd(tmp_path / "rnd", tie_word_embeddings=True)
    edit_tensors(path, lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"][:100].copy()}))
    refused(path, "lm_head.weight that differs")


def test_untied_head_must_be_stored(tmp_path):
    path = write_rnd(tmp_path / "rnd", tie_word_embeddings=True)
    edit_json(path / "config.json", tie_word_embeddings=False)
    refused(path, "1 of", "expected tensors are not stored: lm_head.weight", "fetch the missing shards")


# --- Tensors that are missing, superfluous or of another shape ----------------------------------------------------


def test_missing_tensors_are_named(tmp_path):
    path = write_rnd(tmp_path / "rnd")
    edit_tensors(path, lambda x: [x.pop(f"model.layers.1.mlp.experts.{e}.up_proj.weight") for e in range(6)])
    refused(
        path, "6 of", "expected tensors are not stored", "model.layers.1.mlp.experts.0.up_proj.weight", "and 2 more"
    )


def test_superfluous_tensors_are_named(tmp_path):
    path = write_rnd(tmp_path / "rnd")
    edit_tensors(path, lambda x: x.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(3, np.float32)}))
    refused(path, "1 stored tensors are no part of the model in config.json: model.layers.0.self_attn.q_proj.bias")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.3.mlp.gate.weight"])
def test_shapes_are_checked(tmp_path, name):
    path = write_rnd(tmp_path / "rnd")
    shape = load_file(path / "model.safetensors")[name].shape
    edit_tensors(path, lambda x: x.update({name: np.ascontiguousarray(x[name].T[:-1])}))
    refused(path, f"model.safetensors: {name}: got shape (", f"expected {shape}")


def test_transposed_matrix_is_refused(tmp_path):
    name = "model.layers.3.eh_proj.weight"
    path = write_rnd(tmp_path / "rnd")
    edit_tensors(path, lambda x: x.update({name: np.ascontiguousarray(x[name].T)}))
    refused(path, f"{name}: got shape (128, 64), expected (64, 128)")


# --- Index and shards (field log g2) ------------------------------------------------------------------------------


def shard_names(path: Path) -> list[str]:
    return sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))


def edit_index(path: Path, change) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def test_missing_shard(tmp_path):
    path = write_rnd(tmp_path / "rnd", shards=3)
    shard = shard_names(path)[1]
    first = min(name for name, file in json.loads((path / INDEX).read_text())["weight_map"].items() if file == shard)
    (path / shard).unlink()
    refused(path, f"{shard}: missing, but {INDEX} places", f"{first} among them", "fetch the missing shard")


def test_index_names_a_tensor_absent_from_its_shard(tmp_path):
    path = write_rnd(tmp_path / "rnd", shards=3)
    shard = shard_names(path)[1]
    edit_index(path, lambda placed: placed.update({"model.ghost.weight": shard}))
    refused(path, f"{shard}: lacks model.ghost.weight, which {INDEX} places in it", "of one revision")


@pytest.mark.parametrize("elsewhere", [False, True], ids=["nowhere", "in another shard"])
def test_shard_holds_an_unindexed_tensor(tmp_path, elsewhere):
    path = write_rnd(tmp_path / "rnd", shards=3)
    first, second, _ = shard_names(path)
    extra = min(load_file(path / first)) if elsewhere else "model.extra.weight"
    tensors = load_file(path / second) | {extra: np.zeros(2, np.float32)}
    save_file(tensors, path / second)
    refused(path, f"{second}: holds {extra}, which {INDEX} places in {first if elsewhere else 'nowhere'}")


def test_tensor_placed_in_the_wrong_shard(tmp_path):
    path = write_rnd(tmp_path / "rnd", shards=3)
    first, second, _ = shard_names(path)
    name = min(load_file(path / first))
    edit_index(path, lambda placed: placed.update({name: second}))
    refused(path, f"{first}: holds {name}, which {INDEX} places in {second}")


@pytest.mark.parametrize(
    "shard",
    [
        "../other/model.safetensors",
        "..",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "C:\\a.safetensors",
        "..\\a.safetensors",
        "model.bin",
        "",
        3,
        None,
    ],
)
def test_index_may_not_leave_the_folder(tmp_path, shard):
    path = write_rnd(tmp_path / "rnd", shards=2)
    edit_index(path, lambda placed: placed.update({"model.norm.weight": shard}))
    refused(path, f"{INDEX}: model.norm.weight: got shard {shard!r}, expected the plain name of a .safetensors file")


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": {}}, {"weight_map": ["model.norm.weight"]}, {"weight_map": None}]
)
def test_index_without_a_map(tmp_path, index):
    path = write_rnd(tmp_path / "rnd", shards=2)
    (path / INDEX).write_text(json.dumps(index))
    refused(path, f"{INDEX}: got weight_map", "expected tensor names to shard names")


def test_index_that_names_a_tensor_twice(tmp_path):
    path = write_rnd(tmp_path / "rnd", shards=2)
    (path / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    refused(path, f"{INDEX}: not valid JSON: key 'a' appears twice")


def test_single_file_beside_an_index(tmp_path):
    path = write_rnd(tmp_path / "rnd", shards=2)
    write_rnd(tmp_path / "other")
    (tmp_path / "other/model.safetensors").rename(path / "model.safetensors")
    refused(path, f"got both model.safetensors and an {INDEX} without it: remove the stale one")


def test_index_of_a_single_file(tmp_path):
    path = write_rnd(tmp_path / "rnd")
    names = load_file(path / "model.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert load(path)[0].num_layers == 3


# --- Damaged files ------------------------------------------------------------------------------------------------


def raw_file(file: Path, header, data: bytes = b"", length: int | None = None, pad: int = 0) -> Path:
    """A safetensors file with exactly this header, however wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def entry(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("pad", range(4))
def test_exact_bits_of_every_dtype(tmp_path, pad):
    """Field log g18. All of NaN payloads, negative zero, subnormals; also where the data start unaligned."""
    values = {
        "BF16": np.uint16([0x7FC1, 0x8000, 1, 0x3F80]),
        "F16": np.uint16([0x7E01, 0x8000, 1]),
        "F32": np.uint32([0x7FC00001, 0x80000000, 1]),
        "F8_E4M3": np.uint8([0x7F, 0x80, 1, 0x38, 0xFF]),
        "F8_E8M0": np.uint8([0, 127, 255]),
    }
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, x in values.items():
        header[name] = entry(name, [len(x)], len(data), len(data) + x.nbytes)
        data += x.tobytes()
    header["empty"] = entry("F32", [0, 3], len(data), len(data))
    tensors = read_shard(raw_file(tmp_path / "x.safetensors", header, data, pad=pad))
    assert {name: tensor.dtype.name for name, tensor in tensors.items()} == {
        "BF16": "bfloat16",
        "F16": "float16",
        "F32": "float32",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E8M0": "float8_e8m0fnu",
        "empty": "float32",
    }
    for name, x in values.items():
        np.testing.assert_array_equal(bits(tensors[name].read()), x)
        np.testing.assert_array_equal(bits(tensors[name].read_rows(1, 3)), x[1:3])
    assert tensors["empty"].shape == tensors["empty"].read().shape == (0, 3)


def test_agrees_with_the_safetensors_library(tmp_path):
    path = write_rnd(tmp_path / "rnd", dtype="bfloat16")
    theirs, ours = load_file(path / "model.safetensors"), read_shard(path / "model.safetensors")
    assert theirs.keys() == ours.keys()
    for name, x in theirs.items():
        assert ours[name].dtype == x.dtype
        np.testing.assert_array_equal(bits(ours[name].read()), bits(x))


ONE = entry("F32", [2], 0, 8)
DAMAGE = {
    "empty file": (b"", "got 0 bytes with a header of 0"),
    "seven bytes": (b"1234567", "got 7 bytes with a header of"),
    "header longer than the file": (
        struct.pack("<Q", 100) + b"{}",
        "got 10 bytes with a header of 100, expected a header",
    ),
    "absurd header": (struct.pack("<Q", 2**63) + b"{}", "with a header of 9223372036854775808"),
    "a zip file": (b"PK\x03\x04" + bytes(60), "not a safetensors file, or cut short; fetch the file again"),
}
HEADERS = {
    "not JSON": (b"{'a': 1}", b"", "header: not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "header: not valid JSON"),
    "nested beyond sense": (b"[" * 100_000, b"", "header: not valid JSON"),
    "a list": ([], b"", "header: got JSON list, expected an object"),
    "twice": (
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {}}',
        b"1234",
        "key 'a' appears twice",
    ),
    "not an entry": (
        {"a": 3},
        b"",
        "a: got header entry 3, expected dtype, shape (of 8 axes at most)",
    ),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, b"1234", "a: got header entry"),
    "three offsets": ({"a": ONE | {"data_offsets": [0, 4, 8]}}, bytes(8), "a: got header entry"),
    "negative offset": ({"a": ONE | {"data_offsets": [-8, 0]}}, bytes(8), "a: got header entry"),
    "fraction": ({"a": ONE | {"shape": [2.0]}}, bytes(8), "a: got header entry"),
    "flag": ({"a": ONE | {"shape": [True]}}, bytes(8), "a: got header entry"),
    "negative size": ({"a": ONE | {"shape": [-2]}}, bytes(8), "a: got header entry"),
    "integers": ({"a": ONE | {"dtype": "I32"}}, bytes(8), "a: got dtype 'I32', expected one of BF16, F16, F32"),
    "no dtype": ({"a": ONE | {"dtype": ["F32"]}}, bytes(8), "a: got dtype"),
    "bytes and shape": (
        {"a": ONE | {"shape": [3]}},
        bytes(8),
        "a: got data_offsets [0, 8], 8 bytes, expected 12 for F32 [3]",
    ),
    "reversed": ({"a": ONE | {"data_offsets": [8, 0]}}, bytes(8), "a: got data_offsets [8, 0], -8 bytes, expected 8"),
    "overflowing": ({"a": ONE | {"shape": [2**62, 4]}}, bytes(8), f"8 bytes, expected {2**66} for F32"),
    "overlap": (
        {"a": ONE, "b": entry("F32", [1], 4, 8)},
        bytes(8),
        "b overlaps the tensor before it: got offset 4, expected 8",
    ),
    "gap": (
        {"a": ONE, "b": entry("F32", [1], 12, 16)},
        bytes(16),
        "b leaves a gap before it: got offset 12, expected 8",
    ),
    "late start": ({"a": entry("F32", [2], 4, 12)}, bytes(12), "a leaves a gap before it: got offset 4, expected 0"),
    "out of range": ({"a": entry("F32", [2**40], 0, 2**42)}, bytes(8), "cut short: got"),
    "cut short": ({"a": ONE}, bytes(7), "cut short: got"),
    "too long": ({"a": ONE}, bytes(9), "bytes beyond the last tensor: got"),
}


@pytest.mark.parametrize(("content", "message"), DAMAGE.values(), ids=DAMAGE)
def test_files_without_a_header_are_refused(tmp_path, content, message):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        read_shard(file)
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize(("header", "data", "message"), HEADERS.values(), ids=HEADERS)
def test_damaged_headers_are_refused(tmp_path, header, data, message):
    file = raw_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        read_shard(file)
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize("lost", [1, 1000, 100_000])
def test_truncated_shard_is_named_with_both_sizes(tmp_path, lost):
    path = write_rnd(tmp_path / "rnd", shards=3)
    shard = path / shard_names(path)[2]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-lost])
    refused(path, f"{shard}: cut short: got {len(whole) - lost} bytes, expected {len(whole)}: fetch the file again")


def test_a_damaged_last_shard_is_found_before_anything_is_allocated(tmp_path, monkeypatch):
    path = write_rnd(tmp_path / "rnd", shards=3)
    shard = path / shard_names(path)[2]
    shard.write_bytes(shard.read_bytes()[:-1])
    monkeypatch.setattr(np, "empty", None)
    refused(path, "cut short")


def test_random_damage_is_refused_or_harmless(tmp_path):
    """No byte of a header can make the reader fail in another way, or reach out of the file."""
    rng, file = np.random.default_rng(0), tmp_path / "model.safetensors"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}, file)
    whole = file.read_bytes()
    header, refusals = len(whole) - 32, 0
    for _ in range(400):
        damaged = bytearray(whole)
        for position in rng.integers(0, header, rng.integers(1, 4)):
            damaged[position] = rng.integers(0, 256)
        file.write_bytes(bytes(damaged[: rng.integers(header, len(whole) + 1)] if rng.random() < 0.3 else damaged))
        try:
            tensors = read_shard(file)
        except CheckpointError:
            refusals += 1
        else:
            assert sum(tensor.read().nbytes for tensor in tensors.values()) == 32
    assert refusals > 300


# --- Not a checkpoint ---------------------------------------------------------------------------------------------


def test_no_folder(tmp_path):
    refused(tmp_path / "deepseek-ai/DeepSeek-V3", "no such folder: expected a local one with config.json")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "no such folder: expected a local one", "has to be downloaded first")


def test_no_config(tmp_path):
    refused(tmp_path, "no config.json: expected the folder of a Hugging Face checkpoint")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config.json: not valid JSON"),
        ("[]", "config.json: got JSON list, expected an object"),
        ('{"model_type": "deepseek_v3", "model_type": "llama"}', "key 'model_type' appears twice"),
        ('{"model_type": "llama"}', "config.json: unsupported model_type: got 'llama'"),
        ('{"model_type": "deepseek_v3"}', "config.json: config.json lacks"),
    ],
)
def test_config_that_is_refused(tmp_path, text, message):
    path = write_rnd(tmp_path / "rnd")
    (path / "config.json").write_text(text)
    refused(path, message, str(path))


def test_broken_generation_config(tmp_path):
    path = write_rnd(tmp_path / "rnd")
    (path / "generation_config.json").write_text("{")
    refused(path, "generation_config.json: not valid JSON")


def test_no_weights(tmp_path):
    path = write_rnd(tmp_path / "rnd")
    (path / "model.safetensors").unlink()
    refused(path, f"no weights: expected model.safetensors, or {INDEX} and the shards it names")
    (path / "pytorch_model.bin").write_bytes(b"")
    refused(path, "got pickled weights (pytorch_model.bin), expected safetensors: convert them")


def test_shards_without_an_index(tmp_path):
    path = write_rnd(tmp_path / "rnd", shards=2)
    (path / INDEX).unlink()
    refused(path, f"got model-00001-of-00002.safetensors without {INDEX}", "fetch the index too")


def test_errors_are_value_errors():
    assert issubclass(CheckpointError, ValueError)


# --- Tokenizer ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer_folder(tmp_path):
    """A byte-level BPE that puts `<bos>` before every text, in a folder that calls it a Llama tokenizer."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(["hello world, hello there"] * 3, trainer)
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 0)]
    )
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizerFast", "legacy": true}')
    return tmp_path


@pytest.mark.parametrize("text", ["hello world", "  two  spaces ", "日本語 🙂", "line\nbreak\t", ""])
def test_text_survives(tokenizer_folder, text):
    """Field log g11: the class name in tokenizer_config.json must not replace the tokenizer."""
    tokenizer = load_tokenizer(tokenizer_folder, 300)
    ids = tokenizer.encode(text)
    assert ids[:1] == [0]
    assert 0 not in ids[1:]
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]


def test_highest_id_must_be_in_the_vocabulary(tokenizer_folder):
    highest = max(tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).get_vocab().values())
    assert load_tokenizer(tokenizer_folder, highest + 1) is not None
    message = f"does not match the vocabulary: got ids up to {highest}, expected less than vocab_size {highest}"
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tokenizer_folder, highest)


def test_added_tokens_count_towards_the_highest_id(tokenizer_folder):
    file = tokenizer_folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    size = backend.get_vocab_size()
    backend.add_special_tokens(["<tool>"])
    backend.save(str(file))
    with pytest.raises(CheckpointError, match=f"got ids up to {size}"):
        load_tokenizer(tokenizer_folder, size)


def test_no_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path, 100) is None


def test_broken_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load_tokenizer(tmp_path, 100)


def test_chat_template_sources(tokenizer_folder):
    def template():
        return load_tokenizer(tokenizer_folder, 300).chat_template

    assert template() is None
    config = tokenizer_folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "plain"}))
    assert template() == "plain"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert template() == "usual"
    (tokenizer_folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert template() == "{{ messages }}"


def test_chat_template_of_another_type(tokenizer_folder):
    (tokenizer_folder / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(CheckpointError, match="chat_template: got int, expected text"):
        load_tokenizer(tokenizer_folder, 300)


@pytest.mark.parametrize(
    ("stored", "kept"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32")]
)
def test_narrower_weights_may_stay_and_widen_in_use(tmp_path, stored, kept):
    """`widen=False`: half the memory, and not one bit of the activations changes."""
    folder = write_rnd(tmp_path / "rnd", dtype=stored)
    (config, wide), (_, narrow) = load(folder, jnp.float32), load(folder, jnp.float32, widen=False)
    assert narrow.embed.dtype == narrow.moe.mlp.experts.gate.dtype == stored
    assert narrow.moe.mlp.router.dtype == jnp.float32
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    row = jnp.zeros(1, jnp.int32)
    placement = Placement(jnp.arange(1, 3)[None], row, row + 6, 4 + jnp.arange(6)[None])
    step = jax.jit(paged_forward, static_argnums=1)
    pools = KVCache.create(config, 3, 4, jnp.float32)
    hidden = [step(params, config, tokens, pools, placement)[0] for params in (wide, narrow)]
    assert hidden[1].dtype == jnp.float32
    np.testing.assert_allclose(hidden[0], hidden[1], rtol=1e-6, atol=1e-6)
