"""Every family against transformers' own class, on checkpoints that transformers itself wrote."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from oracles import reference_logits
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from jaxspec import LLM, KVCache, SamplingParams, SamplingState, SpeculativeConfig, init_state
from jaxspec.checkpoint import load
from jaxspec.families import FAMILIES
from jaxspec.models.dense import dense_forward

forward = jax.jit(dense_forward, static_argnums=1)

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 24))
NUM_GREEDY = 12

TRUNK = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 56,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROUTED = {
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
GROUPED = {"n_group": 4, "topk_group": 2}
INDEXER = {
    "index_topk": 24,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
LONGCAT = {key: value for key, value in TRUNK.items() if key not in ("num_hidden_layers", "intermediate_size")} | {
    "num_layers": 2,
    "head_dim": 8,
    "ffn_hidden_size": 56,
    "expert_ffn_hidden_size": 20,
    "n_routed_experts": 6,
    "zero_expert_num": 4,
    "moe_topk": 4,
    "routed_scaling_factor": 3.0,
}


def yarn(**changes: Any) -> dict[str, Any]:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return {"rope_parameters": parameters | changes}


# Name: model_type and the changes to its configuration in transformers.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "V2-Lite: greedy router, uncompressed queries, YaRN": (
        "deepseek_v2",
        TRUNK | ROUTED | yarn(mscale=0.707, mscale_all_dim=0.707) | {"q_lora_rank": None, "topk_method": "greedy"},
    ),
    "V2: groups by their best, biases": (
        "deepseek_v2",
        TRUNK | ROUTED | GROUPED | {"topk_method": "group_limited_greedy", "attention_bias": True},
    ),
    "V3: groups, YaRN, biases": ("deepseek_v3", TRUNK | ROUTED | GROUPED | yarn() | {"attention_bias": True}),
    "Kimi-K2: its YaRN": (
        "kimi_k2",
        TRUNK | ROUTED | yarn(rope_theta=50000.0, factor=32.0, beta_fast=1.0) | {"routed_scaling_factor": 2.827},
    ),
    "GLM-4.7-Flash": ("glm4_moe_lite", TRUNK | ROUTED),
    "GLM-4.7-Flash: groups, two dense layers, biases": (
        "glm4_moe_lite",
        TRUNK
        | ROUTED
        | GROUPED
        | {
            "mlp_layer_types": ["dense", "dense", "sparse"],
            "first_k_dense_replace": 2,
            "attention_bias": True,
            "rms_norm_eps": 0.1,
        },
    ),
    "V3.2 within index_topk": ("deepseek_v32", TRUNK | ROUTED | GROUPED | INDEXER | yarn()),
    "GLM-5 within index_topk, shared indexers": (
        "glm_moe_dsa",
        TRUNK | ROUTED | INDEXER | {"indexer_types": ["full", "shared", "full"]},
    ),
    "Youtu: tied": ("youtu", TRUNK),
    "Youtu: untied, uncompressed queries, YaRN, biases": (
        "youtu",
        TRUNK | yarn() | {"tie_word_embeddings": False, "q_lora_rank": None, "attention_bias": True},
    ),
    "LongCat-Flash": ("longcat_flash", LONGCAT),
    "LongCat-Flash: YaRN, biases": ("longcat_flash", LONGCAT | yarn() | {"attention_bias": True}),
    "Mistral 4: queries scaled over several contexts": (
        "mistral4",
        TRUNK | ROUTED | yarn(original_max_position_embeddings=8, llama_4_scaling_beta=0.4),
    ),
    "Mistral 4: two shared experts, no dense layer, plain weights": (
        "mistral4",
        TRUNK
        | ROUTED
        | yarn(factor=4.0, mscale_all_dim=0.5, llama_4_scaling_beta=0.1)
        | {"n_shared_experts": 2, "first_k_dense_replace": 0, "norm_topk_prob": False},
    ),
}
WITH_MTP = ("deepseek_v3", "kimi_k2", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa", "longcat_flash")


@dataclasses.dataclass(frozen=True)
class Written:
    """A checkpoint, and what transformers makes of it: logits of TOKENS, greedy tokens after their first five."""

    path: Path
    logits: np.ndarray
    greedy: list[int]


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Every weight and buffer that is stored, so that none could be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in model.state_dict().items():
            noise = torch.randn(x.shape, generator=generator)
            if name.endswith(("norm.weight", "norm.0.weight", "norm.1.weight")):
                x.copy_(1 + 0.2 * noise)
            elif "embed" in name or x.ndim == 1:
                x.copy_(noise if x.ndim > 1 else 0.2 * noise)
            else:
                x.copy_(noise / x.shape[-1] ** 0.5)


def write(path: Path, model_type: str, settings: dict[str, Any], seed: int = 0) -> Written:
    """transformers makes, runs and saves a model. Kimi-K2 is its DeepSeek-V3 under another name."""
    own = "deepseek_v3" if model_type == "kimi_k2" else model_type
    config = AutoConfig.for_model(own, **settings, attn_implementation="eager")
    model = getattr(transformers, FAMILIES[model_type].architecture)(config).eval().float()
    randomise(model, seed)
    model.save_pretrained(path)
    edit_config(path, model_type=model_type, **({"num_nextn_predict_layers": 0} if model_type in WITH_MTP else {}))
    ids = torch.as_tensor(TOKENS)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits.numpy()
        prompt = ids[:1, :5]
        mask = torch.ones_like(prompt)
        greedy = model.generate(prompt, attention_mask=mask, max_new_tokens=NUM_GREEDY, do_sample=False)
    return Written(path, logits, greedy[0, 5:].tolist())


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def add_mtp(path: Path, seed: int = 1) -> None:
    """Adds one MTP module, which transformers' classes do not hold: its last layer's tensors drawn anew, and more."""
    config = json.loads((path / "config.json").read_text())
    tensors, rng, hidden = load_file(path / "model.safetensors"), np.random.default_rng(seed), config["hidden_size"]

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        x = rng.standard_normal(shape)
        return ((1 + 0.2 * x) if len(shape) == 1 else x / shape[-1] ** 0.5).astype(np.float32)

    if config["model_type"] == "longcat_flash":
        added = longcat_mtp_shapes(tensors, hidden)
    else:
        layers = config["num_hidden_layers"]
        last, at = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
        added = {at + name.removeprefix(last): x.shape for name, x in tensors.items() if name.startswith(last)}
        added |= {f"{at}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
        added[f"{at}eh_proj.weight"] = (hidden, 2 * hidden)
    save_file(tensors | {name: draw(shape) for name, shape in added.items()}, path / "model.safetensors")
    edit_config(path, num_nextn_predict_layers=1)


def longcat_mtp_shapes(tensors: dict[str, np.ndarray], hidden: int) -> dict[str, tuple[int, ...]]:
    """The names in vLLM's longcat_flash_mtp.py, with the shapes of the trunk's first block."""
    at = "model.mtp.layers.0."
    shapes = {f"{at}{name}.m.weight": (hidden,) for name in ("enorm", "hnorm")}
    shapes |= {f"{at}eh_proj.weight": (hidden, 2 * hidden), "model.mtp.norm.weight": (hidden,)}
    shapes["model.mtp.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].shape
    for name, x in tensors.items():
        if match := re.fullmatch(r"model\.layers\.0\.(self_attn|\w+_layernorm)\.0\.(.*)", name):
            shapes[f"{at}{match[1]}.{match[2]}"] = x.shape
        elif match := re.fullmatch(r"model\.layers\.0\.mlps\.0\.(.*)", name):
            shapes[f"{at}transformer_layer.mlp.{match[1]}"] = x.shape
    return shapes


@pytest.fixture(params=CASES.values(), ids=CASES.keys(), scope="module")
def written(request, tmp_path_factory) -> Written:
    return write(tmp_path_factory.mktemp("family") / "model", *request.param)


def test_logits_equal_transformers(written):
    config, params = load(written.path)
    ours = forward(params, config, jnp.asarray(TOKENS)).logits
    np.testing.assert_allclose(ours, written.logits, atol=1e-4, rtol=0)
    # Differences of this size would show.
    assert float(jnp.std(ours)) > 0.5


def test_greedy_tokens_through_the_engine(written):
    config = json.loads((written.path / "config.json").read_text())
    speculative = None
    if config["model_type"] in WITH_MTP:
        add_mtp(written.path)
        speculative = {"method": "mtp", "num_speculative_tokens": 2}
    llm = LLM(written.path, speculative_config=speculative, max_model_len=24, page_size=4)
    [out] = llm.generate([TOKENS[0, :5].tolist()], SamplingParams(temperature=0.0, max_tokens=NUM_GREEDY))
    assert out.outputs[0].token_ids == written.greedy
    drafted = llm.get_metrics().num_draft_tokens
    assert drafted > 0 if speculative else drafted == 0


@pytest.mark.parametrize("model_type", [m for m in WITH_MTP if m not in ("deepseek_v3", "longcat_flash")])
def test_mtp_logits_equal_transformers(tmp_path, model_type):
    """These families' MTP module is DeepSeek-V3's, the one transformers can run: under its name, without indexers."""
    settings = next(settings for kind, settings in CASES.values() if kind == model_type)
    path, twin = write(tmp_path / "own", model_type, settings).path, tmp_path / "v3"
    add_mtp(path)
    config = json.loads((path / "config.json").read_text())
    write_config_of_v3(twin, config)
    tensors = load_file(path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "indexer" not in k}, twin / "model.safetensors", {"format": "pt"})
    ours = forward(*reversed(load(path)), jnp.asarray(TOKENS))
    logits, [mtp_logits] = reference_logits(twin, TOKENS)
    np.testing.assert_allclose(ours.logits, logits, atol=1e-4, rtol=0)
    np.testing.assert_allclose(ours.mtp_logits[0, :, :-1], mtp_logits, atol=1e-4, rtol=0)


def write_config_of_v3(path: Path, config: dict[str, Any]) -> None:
    dropped = ("layer_types", "mlp_layer_types", "indexer_types", "index_topk", "index_head_dim", "index_n_heads")
    path.mkdir()
    kept = {key: value for key, value in config.items() if key not in dropped}
    renamed = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    (path / "config.json").write_text(json.dumps(kept | renamed))


# --- Sparse attention (DSA) is refused where it would not be dense ------------------------------------------------


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_context_beyond_index_topk_is_refused_by_name(tmp_path, model_type):
    settings = next(settings for kind, settings in CASES.values() if kind == model_type) | {"index_topk": 16}
    written = write(tmp_path / "dsa", model_type, settings)
    config, params = load(written.path)
    # The first 16 positions are dense still; what comes after differs, which is why it must be refused.
    ours = forward(params, dataclasses.replace(config, index_topk=None), jnp.asarray(TOKENS)).logits
    np.testing.assert_allclose(ours[:, :16], written.logits[:, :16], atol=1e-4, rtol=0)
    assert float(np.max(np.abs(ours - written.logits)[:, 16:])) > 0.05
    message = rf"{model_type}: sparse attention is not implemented.* expected at most 16"
    with pytest.raises(ValueError, match=message):
        forward(params, config, jnp.asarray(TOKENS))
    with pytest.raises(ValueError, match=message):
        LLM(written.path, max_model_len=17)
    spec, sampling = SpeculativeConfig(num_speculative_tokens=0), SamplingState.stack([(SamplingParams(), 0, ())], 1)
    with pytest.raises(ValueError, match=message):
        init_state(config, spec, KVCache.create(config, 8, 4, jnp.float32), sampling, 17)
    llm = LLM(written.path)
    assert llm.max_model_len == 16
    [out] = llm.generate([TOKENS[0, :5].tolist()], SamplingParams(temperature=0.0, max_tokens=11))
    assert out.outputs[0].token_ids == written.greedy[:11]


def test_every_family_is_covered():
    assert {model_type for model_type, _ in CASES.values()} == FAMILIES.keys()
