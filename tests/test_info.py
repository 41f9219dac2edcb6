"""`checkpoint_info` and `jaxspec info`: counts against loaded arrays and published figures; what is unsupported."""

import json
import os
import shutil
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from fixtures import (
    DTYPES,
    YARN,
    add_mtp_copies,
    mtp_layers,
    rnd_config,
    rnd_tensors,
    write_folder,
    write_rnd,
    write_tokenizer,
)
from safetensors.numpy import load_file, save_file
from sparse_v3 import V3, write_v3_sparse

from jaxspec import cli
from jaxspec.checkpoint import CheckpointError, checkpoint_info, convert, load
from jaxspec.models.params import count_params

VARIANTS = {
    "plain": {},
    "yarn-groups": {"rope_scaling": YARN, "n_group": 4, "topk_group": 2},
    "null-q_lora": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "no-mtp": {"num_nextn_predict_layers": 0},
    "three-modules": {"num_nextn_predict_layers": 3},
    "all-dense": {"first_k_dense_replace": 3, "num_nextn_predict_layers": 0},
    "no-dense": {"first_k_dense_replace": 0},
}


@pytest.fixture
def run(capsys):
    """`run(*arguments)`: exit status, stdout and stderr of `jaxspec info`."""

    def info(*arguments):
        status = cli.main(["info", *map(str, arguments)])
        return status, *capsys.readouterr()

    return info


def is_mtp(config, name):
    return any(name.startswith(f"model.layers.{layer}.") for layer in mtp_layers(config))


@pytest.mark.parametrize("name", VARIANTS)
def test_counts_are_those_of_the_arrays(tmp_path, name):
    folder = write_rnd(tmp_path / "rnd", **VARIANTS[name])
    config, info = rnd_config(**VARIANTS[name]), checkpoint_info(folder)
    _, params = load(folder)
    assert info.num_parameters == count_params(params.replace(mtp=None))
    assert info.num_mtp_parameters == count_params(params) - info.num_parameters
    stored = load_file(folder / "model.safetensors")
    chosen = config["num_experts_per_tok"] / config["n_routed_experts"]
    active = sum(
        x.size * (chosen if ".experts." in key else 1) for key, x in stored.items() if not is_mtp(config, key)
    )
    if not config["tie_word_embeddings"]:
        active -= (config["vocab_size"] - 1) * config["hidden_size"]
    assert info.num_active_parameters == active
    assert info.kv_bytes_per_token == 3 * (32 + 16) * 2
    assert info.mtp_kv_bytes_per_token == config["num_nextn_predict_layers"] * (32 + 16) * 2
    assert (info.num_mtp_modules, info.context_limit) == (config["num_nextn_predict_layers"], 4096)
    assert (info.model_type, info.architecture) == ("deepseek_v3", "DeepseekV3ForCausalLM")
    assert (info.usable, info.refused, info.quantization) == (True, (), None)


def leaf_sizes(params, *names):
    """Elements of the trunk's leaves whose path has all the names."""
    found = jax.tree_util.tree_leaves_with_path(params.replace(mtp=None))
    return sum(x.size for path, x in found if set(names) <= {key.name for key in path})


def test_bytes_by_part_and_dtype(tmp_path):
    folder = write_rnd(tmp_path / "rnd", shards=3, dtype="bfloat16", mtp_copies=True)
    config, params = load(folder)
    trunk, copies = params.replace(mtp=None), 2 * config.vocab_size * config.hidden_size
    routers = leaf_sizes(trunk, "router") + leaf_sizes(trunk, "router_bias")
    norms = sum(leaf_sizes(trunk, name) for name in ("norm", "attn_norm", "mlp_norm", "q_a_norm", "kv_a_norm"))
    attention = leaf_sizes(trunk, "attn") - leaf_sizes(trunk, "q_a_norm") - leaf_sizes(trunk, "kv_a_norm")
    info = checkpoint_info(folder)
    mtp_router = params.mtp.layer.mlp.router.size + params.mtp.layer.mlp.router_bias.size
    assert info.bytes_by_part == {
        "embedding": 2 * params.embed.size,
        "attention": 2 * attention,
        "dense MLP": 2 * leaf_sizes(trunk, "dense", "mlp"),
        "routed experts": 2 * leaf_sizes(trunk, "experts"),
        "shared experts": 2 * leaf_sizes(trunk, "shared"),
        "router": 4 * routers,
        "norms": 2 * norms,
        "head": 2 * params.head.size,
        "MTP modules": 2 * (count_params(params) - count_params(trunk) + copies - mtp_router) + 4 * mtp_router,
    }
    float32 = routers + mtp_router
    assert info.bytes_by_dtype == {"BF16": info.num_bytes - 4 * float32, "F32": 4 * float32}
    assert list(info.bytes_by_part.values()) == sorted(info.bytes_by_part.values(), reverse=True)
    stored = [load_file(file) for file in folder.glob("*.safetensors")]
    assert info.num_bytes == sum(x.nbytes for shard in stored for x in shard.values())
    assert (info.num_files, info.num_tensors) == (3, sum(map(len, stored)))


V3_SCRIPT = """if True:
    import sys, time
    from pathlib import Path
    from jaxspec.cli import main
    maps, folder = [], Path(sys.argv[1])
    sys.addaudithook(lambda event, _: maps.append(event) if event == "mmap.__new__" else None)
    read = lambda: int(Path("/proc/self/io").read_text().split()[1])
    before, started = read(), time.process_time()
    assert main(["info", str(folder), "--json"]) == 0
    seconds, done = time.process_time() - started, read() - before
    headers = sum(int.from_bytes(file.open("rb").read(8), "little") for file in folder.glob("*.safetensors"))
    assert maps == [] and done < 5 * headers, (maps, done, headers)
    assert seconds < 30, seconds
"""


def test_v3_has_its_published_figures(tmp_path):
    """README_WEIGHTS.md of DeepSeek-V3: 671 B, 11.5 B of MTP beside its copies; the paper: 37 B active.

    JAX can start no backend in this process, which may read headers and the index a few times, and map no file.
    """
    folder = write_v3_sparse(tmp_path / "v3")
    environment = os.environ | {"JAX_PLATFORMS": "nowhere"}
    done = subprocess.run([sys.executable, "-c", V3_SCRIPT, folder], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    info = json.loads(done.stdout)
    assert round(info["num_parameters"] / 1e9) == 671
    assert round(info["num_active_parameters"] / 1e9) == 37
    # Their 11.5 B leave out eh_proj; with it and the copies it is the 14 B of "685 B = 671 B + 14 B".
    assert round((info["num_mtp_parameters"] - 2 * 7168 * 7168) / 1e9, 1) == 11.5
    everything = info["num_parameters"] + info["num_mtp_parameters"] + 2 * 129280 * 7168
    assert everything == pytest.approx(685e9, rel=1e-3)
    # All that is left of them in F32 is the bias of 59 routers with 256 experts.
    assert info["bytes_by_dtype"]["F8_E4M3"] + info["bytes_by_dtype"]["BF16"] // 2 == everything - 59 * 256
    assert info["bytes_by_dtype"].keys() == {"F8_E4M3", "BF16", "F32"}
    assert (info["kv_bytes_per_token"], info["mtp_kv_bytes_per_token"]) == (61 * 576 * 2, 576 * 2)
    assert (info["context_limit"], info["num_mtp_modules"]) == (163840, 1)
    assert (info["num_files"], info["num_tensors"]) == (163, 91991)
    assert info["quantization"] == "fp8 e4m3 in blocks of 128 x 128"
    assert info["refused"] == []


def test_the_command_prints_a_table_or_one_object(tmp_path, run):
    folder = write_rnd(tmp_path / "rnd")
    write_tokenizer(folder, 128)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    info = checkpoint_info(folder)
    status, out, err = run(folder, "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert json.loads(out) == json.loads(json.dumps(info.to_dict()))
    assert json.loads(out)["usable"] is True
    status, out, err = run(folder)
    assert (status, err) == (0, "")
    lines = dict(line.split("  ", 1) for line in out.replace("\n  ", "\n").splitlines())
    lines = {label: text.strip() for label, text in lines.items()}
    assert lines["model"] == "deepseek_v3 (DeepseekV3ForCausalLM)"
    assert (
        lines["parameters"]
        == f"{info.num_parameters / 1e3:.3f} k, {info.num_active_parameters / 1e3:.3f} k active per token"
    )
    assert lines["KV cache"] == "288 bytes a token in bfloat16, 96 for MTP"
    assert lines["context limit"] == "4,096 tokens"
    assert lines["tokenizer"] == "yes, with chat template"
    assert lines["stored"] == f"{info.num_bytes / 1e6:.3f} MB in 1 files, {info.num_tensors} tensors"
    assert lines["embedding"] == "32.768 kB"
    assert lines["in F32"] == f"{info.num_bytes / 1e6:.3f} MB"
    assert lines["usable"] == "yes"
    assert not {"refused", "limited"} & lines.keys()


def without(*names):
    def change(config, tensors):
        for name in [n for n in tensors if n.startswith(names)]:
            del tensors[name]

    return change


def having(**changes):
    return lambda config, tensors: config.update(changes)


def extra(name, dtype=np.float32):
    return lambda config, tensors: tensors.update({name: np.zeros((2, 2), dtype)})


def wrong_shape(config, tensors):
    tensors["model.norm.weight"] = np.ones(65, np.float32)


REFUSED = {
    "family": (having(model_type="llama"), "unsupported model_type: got 'llama', expected one of"),
    "key": (having(sliding_window=7), "config.json has keys this library does not know"),
    "mtp": (without("model.layers.3."), "config.json promises 1 MTP modules, none is stored"),
    "missing": (
        without("model.norm", "model.layers.1.mlp.gate."),
        "rnd: not stored: model.layers.1.mlp.gate.e_score_correction_bias, model.layers.1.mlp.gate.weight, ",
    ),
    "unused": (extra("model.layers.9.w"), "rnd: stored, but no part of the model in config.json: model.layers.9.w"),
    "shape": (wrong_shape, "rnd: of another shape than config.json says: model.norm.weight"),
    "dtype": (extra("model.layers.0.x", np.int8), "model.layers.0.x: got dtype 'I8', expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_loaded_is_described_all_the_same(tmp_path, run, name):
    config, tensors = rnd_config(), rnd_tensors(rnd_config())
    change, sentence = REFUSED[name]
    change(config, tensors)
    write_folder(tmp_path / "rnd", config, tensors)
    with pytest.raises(CheckpointError):
        load(tmp_path / "rnd")
    status, out, err = run(tmp_path / "rnd", "--json")
    assert (status, err) == (1, "")
    info = json.loads(out)
    assert info["usable"] is False
    assert any(sentence in given for given in info["refused"]), info["refused"]
    assert info["num_tensors"] == len(tensors)
    assert info["num_bytes"] == sum(x.nbytes for x in tensors.values())
    assert info["num_parameters"] is None or name not in ("family", "key")
    assert sum(info["bytes_by_part"].values()) == sum(info["bytes_by_dtype"].values()) == info["num_bytes"]
    status, out, _ = run(tmp_path / "rnd")
    assert status == 1
    assert "refused" in out


def test_missing_shards_are_counted(tmp_path):
    folder = write_rnd(tmp_path / "rnd", shards=5)
    for number in (2, 4):
        (folder / f"model-0000{number}-of-00005.safetensors").unlink()
    info = checkpoint_info(folder)
    assert info.refused == (
        f"{folder}: 2 of 5 shards are missing: model-00002-of-00005.safetensors, model-00004-of-00005.safetensors: "
        "fetch them",
    )
    assert info.num_files == 3
    assert info.num_tensors > 0


def test_a_damaged_shard_is_named_and_the_others_counted(tmp_path):
    folder = write_rnd(tmp_path / "rnd", shards=3)
    damaged = folder / "model-00002-of-00003.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    info = checkpoint_info(folder)
    assert str(damaged) in " ".join(info.refused)
    rest = [load_file(folder / f"model-0000{n}-of-00003.safetensors") for n in (1, 3)]
    assert info.num_bytes == sum(x.nbytes for shard in rest for x in shard.values())


def test_an_index_does_not_reach_out_of_its_folder(tmp_path):
    write_rnd(tmp_path / "other")
    folder = write_rnd(tmp_path / "rnd", shards=2)
    index = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    info = checkpoint_info(folder)
    assert info.num_tensors == 0
    assert info.refused


def test_a_store(tmp_path, run):
    """As its source, but that arrays are stacked; what is damaged is said here too."""
    source = write_rnd(tmp_path / "rnd", dtype="bfloat16")
    convert(source, tmp_path / "store")
    info, expected = checkpoint_info(tmp_path / "store").to_dict(), checkpoint_info(source).to_dict()
    _, params = load(source)
    assert info["num_tensors"] == len(jax.tree.leaves(params))
    assert info["num_files"] == sum(file.is_file() for file in (tmp_path / "store" / "parts").rglob("*"))
    different = {"path", "num_tensors", "num_files"}
    assert {k: v for k, v in info.items() if k not in different} == {
        k: v for k, v in expected.items() if k not in different
    }
    shutil.rmtree(tmp_path / "store" / "parts" / "top")
    status, out, _ = run(tmp_path / "store", "--json")
    assert status == 1
    assert "parts/top/" in json.loads(out)["refused"][0]


def test_config_without_weights(tmp_path, run):
    folder = write_rnd(tmp_path / "rnd")
    (folder / "model.safetensors").unlink()
    status, out, _ = run(folder, "--json")
    info = json.loads(out)
    assert (status, info["num_tensors"]) == (1, 0)
    assert "no weights" in info["refused"][0]
    assert info["num_parameters"] > 0


def test_weights_without_config(tmp_path):
    folder = write_rnd(tmp_path / "rnd")
    (folder / "config.json").unlink()
    info = checkpoint_info(folder)
    assert "no config.json" in info.refused[0]
    assert info.num_bytes > 0
    assert info.model_type is None


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "got neither config.json nor safetensors"),
    ],
)
def test_nothing_to_read(tmp_path, run, make, sentence):
    make(tmp_path / "empty")
    status, out, err = run(tmp_path / "empty", "--json")
    assert (status, out) == (2, "")
    assert err.startswith(f"jaxspec: error: {tmp_path / 'empty'}: {sentence}")


def test_copies_of_embedding_and_head_are_no_fault(tmp_path):
    """Nor is a head stored beside a tied embedding: whether they are equal is for the reader to say."""
    config = rnd_config(tie_word_embeddings=True)
    tensors = rnd_tensors(config)
    count = checkpoint_info(write_rnd(tmp_path / "rnd", tie_word_embeddings=True)).num_mtp_parameters
    add_mtp_copies(config, tensors)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_folder(tmp_path / "rnd", config, tensors)
    info = checkpoint_info(tmp_path / "rnd")
    assert info.refused == ()
    assert info.num_mtp_parameters == count


def test_what_will_not_work_is_said(tmp_path):
    dsa = {"model_type": "deepseek_v32", "index_topk": 64, "index_head_dim": 16, "index_n_heads": 4}
    config, tensors = rnd_config(**dsa), rnd_tensors(rnd_config())
    tensors["model.layers.0.self_attn.indexer.wk.weight"] = np.zeros((16, 64), np.float32)
    write_folder(tmp_path / "dsa", config, tensors)
    info = checkpoint_info(tmp_path / "dsa")
    assert (info.refused, info.context_limit) == ((), 64)
    tokenizer, sparse = info.limited
    assert tokenizer.startswith("there is no tokenizer.json")
    assert sparse.startswith("sparse attention is not implemented: of 4096 tokens of context, the 64 within which")


def test_mixed_dtypes_are_a_limit(tmp_path):
    tensors = {name: x.astype(DTYPES["bfloat16"]) for name, x in rnd_tensors(rnd_config()).items()}
    for name, dtype in (("model.norm.weight", "float32"), ("lm_head.weight", "float16")):
        tensors[name] = tensors[name].astype(DTYPES[dtype])
    write_folder(tmp_path / "rnd", rnd_config(), tensors)
    info = checkpoint_info(tmp_path / "rnd")
    assert info.usable
    assert info.limited[1:] == ("weights are stored in BF16 and F16 and F32: one has to be chosen as dtype",)
    with pytest.raises(CheckpointError, match="expected one dtype: pass dtype"):
        load(tmp_path / "rnd")


def test_a_config_of_endless_layers(tmp_path):
    """What config.json promises is not counted up to."""
    folder = write_rnd(tmp_path / "rnd")
    (folder / "config.json").write_text(json.dumps(rnd_config(num_hidden_layers=10**9)))
    (refused,) = checkpoint_info(folder).refused
    assert f"{folder}: 133 tensors are stored, but config.json promises" in refused


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    other, folder = write_rnd(tmp_path / "other"), write_rnd(tmp_path / "rnd")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(other / "model.safetensors")
    info = checkpoint_info(folder)
    assert info.num_tensors == 0
    assert "got a link to" in info.refused[0]


def test_fp8_without_scales_or_with_another_quantization(tmp_path):
    config = rnd_config(quantization_config=V3["quantization_config"])
    tensors = {name: x.astype(DTYPES["bfloat16"]) for name, x in rnd_tensors(config).items()}
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(ml_dtypes.float8_e4m3fn)
    write_folder(tmp_path / "rnd", config, tensors)
    info = checkpoint_info(tmp_path / "rnd")
    assert "lm_head.weight: got F8_E4M3, expected lm_head.weight_scale_inv beside it" in info.refused[0]
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "rnd" / "config.json").write_text(json.dumps(config))
    info = checkpoint_info(tmp_path / "rnd")
    assert info.quantization == "awq"
    assert "quantization_config: quant_method: got 'awq'" in info.refused[0]
    assert info.bytes_by_dtype["F8_E4M3"] == 128 * 64


def test_a_bad_chat_template_is_a_limit(tmp_path):
    folder = write_rnd(tmp_path / "rnd")
    write_tokenizer(folder, 128)
    (folder / "tokenizer_config.json").write_text('{"chat_template": 3}')
    info = checkpoint_info(folder)
    assert (info.has_tokenizer, info.has_chat_template) == (True, False)
    assert info.limited == (f"{folder / 'tokenizer_config.json'}: chat_template: got int, expected text",)
    assert info.usable


def test_names_of_other_families(tmp_path):
    """Parts of a checkpoint that is refused, by the names of LongCat-Flash and DeepSeek-V4."""
    names = {
        "model.layers.0.self_attn.0.q_b_proj.weight": "attention",
        "model.layers.0.mlps.1.up_proj.weight": "dense MLP",
        "model.layers.0.mlp.router.classifier.weight": "router",
        "model.layers.0.mlp.experts.3.up_proj.weight": "routed experts",
        "model.mtp.layers.0.transformer_layer.mlp.up_proj.weight": "MTP modules",
        "layers.2.attn.wo_a.weight": "attention",
        "layers.2.ffn.gate.tid2eid": "router",
        "layers.2.ffn.shared_experts.w1.scale": "shared experts",
        "layers.2.hc_attn_fn": "attention",
        "mtp.0.h_proj.weight": "MTP modules",
        "embed.weight": "embedding",
        "head.weight": "head",
        "norm.weight": "norms",
        "engram.table": "other",
    }
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "other"}))
    save_file({name: np.zeros(2**i, np.uint8) for i, name in enumerate(names)}, folder / "model.safetensors")
    expected = {part: sum(2**i for i, name in enumerate(names) if names[name] == part) for part in names.values()}
    assert checkpoint_info(folder).bytes_by_part == expected
