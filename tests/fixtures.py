"""Checkpoints written to disk with NumPy alone: neither the reader nor the writer under test has a hand in them.

RND is seeded random. CYC counts upward and fixes by its file alone which drafts are accepted; with noise it is SOFT:
the same tokens, but every logit depends on the whole context, so a stale cache entry shows.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file

# Within 40 tokens any changed token moves every later log-probability by more than 1e-4, yet no argmax moves.
SOFT_NOISE = 0.005

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
Tensors = dict[str, np.ndarray]

# config.json of RND, by released key names: three layers, the first dense, and one MTP module.
RND = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}


def rnd_config(**changes: Any) -> dict[str, Any]:
    """config.json of RND, changed."""
    return RND | changes


def write_rnd(
    path: Path, *, seed: int = 0, shards: int = 1, dtype: str = "float32", mtp_copies: bool = False, **changes: Any
) -> Path:
    """Writes RND.

    Args:
        path: folder to make.
        seed: of the weights.
        shards: number of safetensors files; several come with an index.
        dtype: stored dtype of all but the router.
        mtp_copies: store the MTP modules' copies of embedding and head, as released files do.
        changes: to config.json, such as `rope_scaling=YARN`, `n_group=4` or `num_nextn_predict_layers=3`.
    """
    config = rnd_config(torch_dtype=dtype, **changes)
    tensors = rnd_tensors(config, seed)
    if mtp_copies:
        add_mtp_copies(config, tensors)
    write_folder(path, config, {name: _stored(name, x, dtype) for name, x in tensors.items()}, shards)
    return Path(path)


def write_cyc(
    path: Path,
    drafts: str = "hit",
    noise: float = 0.0,
    *,
    seed: int = 0,
    eos_token_id: int | list[int] | None = None,
    tied: bool = False,
    mtp_copies: bool = False,
    **changes: Any,
) -> Path:
    """Writes CYC: the greedy successor of token t is t + 1, modulo the vocabulary of 64.

    The MTP module sees only the token it is fed, so recycled drafts behave like first ones.

    Args:
        path: folder to make.
        drafts: "hit" always proposes the successor of the token fed, "miss" never does, "mix" does not where that
            token is 3 modulo 4.
        noise: standard deviation of attention and MLP outputs' weights; `SOFT_NOISE` makes SOFT.
        seed: of the weights that cannot be seen without noise.
        eos_token_id: none unless given.
        tied: tie the head to the embedding. The first layer's MLP then does the counting, and stays free of noise.
        mtp_copies: store the MTP modules' copies of embedding and head, as released files do.
        changes: to config.json.
    """
    size = 64
    config = rnd_config(
        vocab_size=size, hidden_size=size, eos_token_id=eos_token_id, tie_word_embeddings=tied, **changes
    )
    tensors = rnd_tensors(config, seed)
    rng = np.random.default_rng(seed + 1)
    for name, x in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = noise * rng.standard_normal(x.shape, np.float32)
        elif "norm.weight" in name:
            tensors[name] = np.ones_like(x)
    _count_upward(config, tensors)
    _set_drafts(config, tensors, drafts)
    if mtp_copies:
        add_mtp_copies(config, tensors)
    write_folder(path, config, tensors)
    return Path(path)


def _count_upward(config: dict[str, Any], tensors: Tensors) -> None:
    size = config["vocab_size"]
    eye = np.eye(size, dtype=np.float32)
    tensors["model.embed_tokens.weight"] = eye
    if not config["tie_word_embeddings"]:
        # Row t + 1 of the head reads direction t.
        tensors["lm_head.weight"] = np.roll(eye, 1, axis=0)
        return
    # The embedding reads direction t as t, so the first MLP adds a larger t + 1 to it: SwiGLU of a normalised
    # one-hot is 8 * silu(8) there, and about 64.
    mlp = "model.layers.0.mlp."
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"{mlp}{name}.weight"] = np.zeros_like(tensors[f"{mlp}{name}.weight"])
    tensors[f"{mlp}gate_proj.weight"][:size] = tensors[f"{mlp}up_proj.weight"][:size] = eye
    tensors[f"{mlp}down_proj.weight"][:, :size] = np.roll(eye, 1, axis=0)


def _set_drafts(config: dict[str, Any], tensors: Tensors, drafts: str) -> None:
    """eh_proj = [M | 0]: column t of M is the direction that a fed token t leaves; the head makes it a draft."""
    size, fed = config["vocab_size"], np.arange(config["vocab_size"])
    wrong = {"hit": fed < 0, "miss": fed >= 0, "mix": fed % 4 == 3}[drafts]
    direction = (fed + wrong + config["tie_word_embeddings"]) % size
    for layer in mtp_layers(config):
        eh_proj = np.zeros((size, 2 * size), np.float32)
        eh_proj[direction, fed] = 1.0
        tensors[f"model.layers.{layer}.eh_proj.weight"] = eh_proj


def mtp_layers(config: dict[str, Any]) -> range:
    depth = config["num_hidden_layers"]
    return range(depth, depth + config["num_nextn_predict_layers"])


def rnd_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Seeded float32 tensors by stored name, scaled so that all logits are of order one."""
    rng, tensors = np.random.default_rng(seed), {}
    hidden, vocab = config["hidden_size"], config["vocab_size"]

    def linear(name: str, fan_out: int, fan_in: int, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = (rng.standard_normal((fan_out, fan_in)) / np.sqrt(fan_in)).astype(np.float32)
        if bias:
            tensors[f"{name}.bias"] = (0.3 * rng.standard_normal(fan_out)).astype(np.float32)

    def norm(name: str, size: int = hidden) -> None:
        tensors[f"{name}.weight"] = (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    tensors["model.embed_tokens.weight"] = rng.standard_normal((vocab, hidden)).astype(np.float32)
    for layer in range(config["num_hidden_layers"]):
        _layer(config, linear, norm, f"model.layers.{layer}.", moe=layer >= config["first_k_dense_replace"])
    for layer in mtp_layers(config):
        at = f"model.layers.{layer}."
        for name in ("enorm", "hnorm", "shared_head.norm"):
            norm(f"{at}{name}")
        linear(f"{at}eh_proj", hidden, 2 * hidden)
        _layer(config, linear, norm, at, moe=True)
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        bias = 0.1 * rng.standard_normal(config["n_routed_experts"])
        tensors[name.replace("weight", "e_score_correction_bias")] = bias.astype(np.float32)
    norm("model.norm")
    if not config["tie_word_embeddings"]:
        linear("lm_head", vocab, hidden)
    return tensors


def _layer(config: dict[str, Any], linear, norm, at: str, moe: bool) -> None:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_lora, biased, attn = config["q_lora_rank"], config["attention_bias"], f"{at}self_attn."
    norm(f"{at}input_layernorm")
    norm(f"{at}post_attention_layernorm")
    norm(f"{attn}kv_a_layernorm", latent)
    if q_lora is None:
        linear(f"{attn}q_proj", heads * (nope + rope), hidden)
    else:
        linear(f"{attn}q_a_proj", q_lora, hidden, biased)
        norm(f"{attn}q_a_layernorm", q_lora)
        linear(f"{attn}q_b_proj", heads * (nope + rope), q_lora)
    linear(f"{attn}kv_a_proj_with_mqa", latent + rope, hidden, biased)
    linear(f"{attn}kv_b_proj", heads * (nope + value), latent)
    linear(f"{attn}o_proj", hidden, heads * value, biased)
    if not moe:
        _mlp(linear, f"{at}mlp.", hidden, config["intermediate_size"])
        return
    linear(f"{at}mlp.gate", config["n_routed_experts"], hidden)
    for expert in range(config["n_routed_experts"]):
        _mlp(linear, f"{at}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
    _mlp(linear, f"{at}mlp.shared_experts.", hidden, config["n_shared_experts"] * config["moe_intermediate_size"])


def _mlp(linear, at: str, hidden: int, ffn: int) -> None:
    linear(f"{at}gate_proj", ffn, hidden)
    linear(f"{at}up_proj", ffn, hidden)
    linear(f"{at}down_proj", hidden, ffn)


def _stored(name: str, tensor: np.ndarray, dtype: str) -> np.ndarray:
    return tensor if ".mlp.gate." in name else tensor.astype(DTYPES[dtype])


def add_mtp_copies(config: dict[str, Any], tensors: Tensors) -> None:
    """The MTP modules' copies of the trunk's embedding and head, under their own names."""
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    for layer in mtp_layers(config):
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = tensors[head].copy()


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Token i is the word i. There is no unknown word: other text cannot be encoded."""
    words = tokenizers.models.WordLevel({str(i): i for i in range(vocab_size)}, unk_token="unknown")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_folder(path: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> None:
    """Writes config.json and the tensors, in place of what the folder held."""
    path = Path(path)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[len(names) * i // shards : len(names) * (i + 1) // shards]
        save_file({name: tensors[name] for name in part}, path / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
