"""DeepSeek-V3 as released, in every name, shape, dtype and shard, but for the bytes: its files are sparse."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

NUM_SHARDS, BLOCK = 163, 128
# config.json of the release.
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
Entry = tuple[str, str, tuple[int, ...]]


def v3_tensors(*, mtp_copies: bool = True) -> Iterator[Entry]:
    """Yields (name, dtype, shape) of the release's 91,991 tensors, two of them the MTP module's copies."""
    hidden, vocab, depth = V3["hidden_size"], V3["vocab_size"], V3["num_hidden_layers"]
    yield "model.embed_tokens.weight", "BF16", (vocab, hidden)
    for layer in range(depth + 1):
        at = f"model.layers.{layer}."
        if layer == depth:
            yield from _mtp_entries(at, mtp_copies)
        yield from _layer_entries(at, moe=layer >= V3["first_k_dense_replace"])
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocab, hidden)


def _mtp_entries(at: str, copies: bool) -> Iterator[Entry]:
    hidden, vocab = V3["hidden_size"], V3["vocab_size"]
    if copies:
        yield f"{at}embed_tokens.weight", "BF16", (vocab, hidden)
        yield f"{at}shared_head.head.weight", "BF16", (vocab, hidden)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{at}{norm}.weight", "BF16", (hidden,)
    yield f"{at}eh_proj.weight", "BF16", (hidden, 2 * hidden)


def _layer_entries(at: str, moe: bool) -> Iterator[Entry]:
    hidden, heads, latent, q_lora = (
        V3[k] for k in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    nope, rope, value = V3["qk_nope_head_dim"], V3["qk_rope_head_dim"], V3["v_head_dim"]
    attn = f"{at}self_attn."
    for name, size in (
        (f"{at}input_layernorm", hidden),
        (f"{at}post_attention_layernorm", hidden),
        (f"{attn}q_a_layernorm", q_lora),
        (f"{attn}kv_a_layernorm", latent),
    ):
        yield f"{name}.weight", "BF16", (size,)
    yield from _linear_entries(f"{attn}q_a_proj", q_lora, hidden)
    yield from _linear_entries(f"{attn}q_b_proj", heads * (nope + rope), q_lora)
    yield from _linear_entries(f"{attn}kv_a_proj_with_mqa", latent + rope, hidden)
    yield from _linear_entries(f"{attn}kv_b_proj", heads * (nope + value), latent)
    yield from _linear_entries(f"{attn}o_proj", hidden, heads * value)
    if not moe:
        yield from _mlp_entries(f"{at}mlp.", V3["intermediate_size"])
        return
    yield f"{at}mlp.gate.weight", "BF16", (V3["n_routed_experts"], hidden)
    yield f"{at}mlp.gate.e_score_correction_bias", "F32", (V3["n_routed_experts"],)
    yield from _mlp_entries(f"{at}mlp.shared_experts.", V3["moe_intermediate_size"])
    for expert in range(V3["n_routed_experts"]):
        yield from _mlp_entries(f"{at}mlp.experts.{expert}.", V3["moe_intermediate_size"])


def _mlp_entries(at: str, ffn: int) -> Iterator[Entry]:
    yield from _linear_entries(f"{at}gate_proj", ffn, V3["hidden_size"])
    yield from _linear_entries(f"{at}up_proj", ffn, V3["hidden_size"])
    yield from _linear_entries(f"{at}down_proj", V3["hidden_size"], ffn)


def _linear_entries(name: str, fan_out: int, fan_in: int) -> Iterator[Entry]:
    yield f"{name}.weight", "F8_E4M3", (fan_out, fan_in)
    yield f"{name}.weight_scale_inv", "F32", (-(-fan_out // BLOCK), -(-fan_in // BLOCK))


def write_v3_sparse(folder: Path, *, mtp_copies: bool = True) -> Path:
    """Writes config.json, the index and 163 shards: real headers, and data that are holes and read as zeros.

    Args:
        folder: made when absent. It takes some 20 MB of disk, and 690 GB by `ls -l`.
        mtp_copies: store the MTP module's copies of embedding and head, as the release does.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(V3, indent=2))
    entries = list(v3_tensors(mtp_copies=mtp_copies))
    total, weight_map, shards, done = sum(_nbytes(entry) for entry in entries), {}, [[]], 0
    for entry in entries:
        if done >= total * len(shards) / NUM_SHARDS:
            shards.append([])
        shards[-1].append(entry)
        done += _nbytes(entry)
    assert len(shards) == NUM_SHARDS
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{NUM_SHARDS:06d}.safetensors"
        _write_shard(folder / name, shard)
        weight_map |= dict.fromkeys((entry[0] for entry in shard), name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def _nbytes(entry: Entry) -> int:
    return _BYTES[entry[1]] * math.prod(entry[2])


def _write_shard(file: Path, entries: list[Entry]) -> None:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for entry in entries:
        begin, end = end, end + _nbytes(entry)
        header[entry[0]] = {"dtype": entry[1], "shape": list(entry[2]), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end)
