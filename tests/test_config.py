"""config.json: both key forms read alike, and nothing is guessed."""

import dataclasses
import json
import math

import pytest
from fixtures import YARN, rnd_config

from jaxspec.config import ModelConfig, SpeculativeConfig
from jaxspec.families import FAMILIES


def new_form(config: dict) -> dict:
    """The same architecture with the keys that transformers 5 writes."""
    gone = "rope_theta rope_scaling scoring_func topk_method moe_layer_freq torch_dtype".split()
    scaling = dict(config["rope_scaling"] or {"type": "default"})
    parameters = {"rope_type": scaling.pop("type"), "rope_theta": config["rope_theta"]} | scaling
    kept = {key: value for key, value in config.items() if key not in gone}
    derived = {
        "dtype": config["torch_dtype"],
        "head_dim": config["qk_rope_head_dim"],
        "qk_head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "output_router_logits": False,
        "rope_interleave": True,
        "transformers_version": "5.24.0",
        "pad_token_id": None,
        "pretraining_tp": 1,
        "use_cache": True,
    }
    return kept | {"rope_parameters": parameters} | derived


@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "YaRN"])
def test_both_key_forms_are_equal(scaling):
    old = rnd_config(rope_scaling=scaling, rope_theta=50000.0, eos_token_id=[2, 5])
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new_form(old))


def test_reads_every_value():
    config = ModelConfig.from_hf(rnd_config(rope_scaling=YARN, rope_theta=50000.0, rope_interleave=False))
    assert (config.num_layers, config.num_heads, config.num_mtp_layers) == (3, 4, 1)
    assert (config.qk_head_dim, config.num_moe_layers, config.num_cached_layers) == (32, 2, 4)
    assert (config.rope.theta, config.rope.interleave) == (50000.0, False)
    yarn = config.rope.yarn
    assert (yarn.factor, yarn.original_max_position_embeddings, yarn.mscale) == (40, 64, 1.0)
    assert ModelConfig.from_hf(rnd_config()).rope.yarn is None


def test_keys_of_the_released_deepseek_v3_are_known():
    released = {
        "ep_size": 1,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "pretraining_tp": 1,
        "auto_map": {"AutoConfig": "x"},
    }
    assert ModelConfig.from_hf(rnd_config() | released) == ModelConfig.from_hf(rnd_config())


@pytest.mark.parametrize(
    "scaling", [None, YARN | {"attention_factor": 1.5, "truncate": False}], ids=["plain", "YaRN"]
)
@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None, "eos_token_id": 7}, {"tie_word_embeddings": True}])
def test_to_hf_is_the_inverse(scaling, changes):
    config = ModelConfig.from_hf(rnd_config(rope_scaling=scaling, **changes))
    stored = json.loads(json.dumps(config.to_hf("bfloat16")))
    assert ModelConfig.from_hf(stored) == config
    assert stored["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (2, None, (2,)),
        (None, None, ()),
        (2, {"eos_token_id": [2, 5]}, (2, 5)),
        (2, {"eos_token_id": 7}, (7,)),
        ([2, 5], {"temperature": 1.0}, (2, 5)),
        (2, {"eos_token_id": None}, ()),
    ],
)
def test_generation_config_has_the_say_on_eos(own, generation, expected):
    """Field log g13: the list, not just the first id, and from the file that generation reads."""
    assert ModelConfig.from_hf(rnd_config(eos_token_id=own), generation).eos_token_ids == expected


def test_a_null_in_rope_scaling_is_the_default():
    given = ModelConfig.from_hf(rnd_config(rope_scaling=YARN | {"beta_fast": None, "attention_factor": None}))
    assert given == ModelConfig.from_hf(rnd_config(rope_scaling=YARN))


# --- Families: in the keys and the sizes of the released models ----------------------------------------------------

YARN_OF = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}


def sizes(names: str, *values: int | None) -> dict:
    keys = {
        "V": "vocab_size",
        "H": "hidden_size",
        "L": "num_hidden_layers",
        "A": "num_attention_heads",
        "Q": "q_lora_rank",
        "N": "qk_nope_head_dim",
        "W": "v_head_dim",
        "F": "intermediate_size",
        "M": "moe_intermediate_size",
        "E": "n_routed_experts",
        "S": "n_shared_experts",
        "K": "num_experts_per_tok",
        "D": "first_k_dense_replace",
        "C": "max_position_embeddings",
    }
    return {keys[name]: value for name, value in zip(names, values, strict=True)}


MAIN = "VHLAQNWFMESKDC"
RELEASED = {
    "V2-Lite": COMMON
    | sizes(MAIN, 102400, 2048, 27, 16, None, 128, 128, 10944, 1408, 64, 2, 6, 1, 163840)
    | {
        "model_type": "deepseek_v2",
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": YARN_OF | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "ep_size": 1,
        "pretraining_tp": 1,
        "num_key_value_heads": 16,
        "auto_map": {},
    },
    "R1": COMMON
    | sizes(MAIN, 129280, 7168, 61, 128, 1536, 128, 128, 18432, 2048, 256, 1, 8, 3, 163840)
    | {
        "model_type": "deepseek_v3",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": YARN_OF | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8"},
    },
    "V3.2": COMMON
    | sizes(MAIN, 129280, 7168, 61, 128, 1536, 128, 128, 18432, 2048, 256, 1, 8, 3, 163840)
    | {
        "model_type": "deepseek_v32",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": YARN_OF | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        "num_nextn_predict_layers": 1,
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
    },
    "Kimi-K2": COMMON
    | sizes(MAIN, 163840, 7168, 61, 64, 1536, 128, 128, 18432, 2048, 384, 1, 8, 1, 131072)
    | {
        "model_type": "kimi_k2",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_scaling": YARN_OF | {"factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "num_nextn_predict_layers": 0,
    },
    "GLM-4.7-Flash": COMMON
    | sizes(MAIN, 154880, 2048, 47, 20, 768, 192, 256, 10240, 1536, 64, 1, 4, 1, 202752)
    | {
        "model_type": "glm4_moe_lite",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "partial_rotary_factor": 1.0,
        "num_nextn_predict_layers": 1,
        "eos_token_id": [154820, 154827, 154829],
        "pad_token_id": 154820,
    },
    "GLM-5": COMMON
    | sizes(MAIN, 154880, 6144, 78, 64, 2048, 192, 256, 12288, 2048, 256, 1, 8, 3, 202752)
    | {
        "model_type": "glm_moe_dsa",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "num_nextn_predict_layers": 1,
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "indexer_rope_interleave": True,
        "rope_interleave": True,
    },
    "Youtu-LLM": COMMON
    | sizes("VHLAQNWFC", 128256, 2048, 32, 16, 1536, 128, 128, 6144, 131072)
    | {
        "model_type": "youtu",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1600000,
        "rope_interleave": True,
        "embedding_initializer_range": 0.04,
        "mlp_bias": False,
    },
    "LongCat-Flash": COMMON
    | sizes("VHAQNWEC", 131072, 6144, 64, 1536, 128, 128, 512, 131072)
    | {
        "model_type": "longcat_flash",
        "num_layers": 28,
        "ffn_hidden_size": 12288,
        "expert_ffn_hidden_size": 2048,
        "moe_topk": 12,
        "zero_expert_num": 256,
        "zero_expert_type": "identity",
        "attention_method": "MLA",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "routed_scaling_factor": 6.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000000.0,
        "num_nextn_predict_layers": 1,
    },
    "Mistral 4": COMMON
    | sizes(MAIN, 131072, 4096, 36, 32, 1024, 64, 128, 12288, 2048, 128, 1, 4, 0, 1048576)
    | {
        "model_type": "mistral4",
        "kv_lora_rank": 256,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "rope_parameters": YARN_OF
        | {
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
            "max_position_embeddings": 1048576,
            "partial_rotary_factor": 0.5,
        },
    },
}
# What tells them apart: cached layers, MTP modules, scoring, method, groups, dense layers, index_topk, softmax scale.
# The scales of V2 and V3 are those of the reference code; the others follow from theirs.
EXPECTED = {
    "V2-Lite": (27, 0, "softmax", "greedy", 1, 1, None, 0.1147214),
    "R1": (62, 1, "sigmoid", "noaux_tc", 8, 3, None, 0.1352338),
    "V3.2": (62, 1, "sigmoid", "noaux_tc", 8, 3, 2048, 0.1352338),
    "Kimi-K2": (61, 0, "sigmoid", "noaux_tc", 1, 1, None, 192**-0.5 * (0.1 * math.log(32) + 1) ** 2),
    "GLM-4.7-Flash": (48, 1, "sigmoid", "noaux_tc", 1, 1, None, 256**-0.5),
    "GLM-5": (79, 1, "sigmoid", "noaux_tc", 1, 3, 2048, 256**-0.5),
    "Youtu-LLM": (32, 0, "sigmoid", "noaux_tc", 1, 32, None, 192**-0.5),
    "LongCat-Flash": (57, 1, "softmax", "noaux_tc", 1, 0, None, 192**-0.5 * 2),
    "Mistral 4": (36, 0, "softmax", "greedy", 1, 0, None, 128**-0.5 * (0.1 * math.log(128) + 1) ** 2),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_files_are_read(name):
    config = ModelConfig.from_hf(RELEASED[name])
    *traits, scale = EXPECTED[name]
    assert [
        config.num_cached_layers,
        config.num_mtp_layers,
        config.scoring_func,
        config.topk_method,
        config.n_group,
        config.first_k_dense_replace,
        config.index_topk,
    ] == traits
    assert config.softmax_scale == pytest.approx(scale, abs=1e-7)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf("bfloat16")))) == config


def test_every_family_has_a_released_file():
    assert {config["model_type"] for config in RELEASED.values()} == FAMILIES.keys()


@pytest.mark.parametrize("name", RELEASED)
def test_every_family_refuses_what_it_does_not_know(name):
    with pytest.raises(ValueError, match=r"will not guess at: \['sliding_window'\]"):
        ModelConfig.from_hf(RELEASED[name] | {"sliding_window": 128})
    parameters = YARN_OF | {"factor": 4, "rope_theta": 10000.0, "short_factor": [1]}
    config = {k: v for k, v in RELEASED[name].items() if k not in ("rope_scaling", "rope_theta")}
    with pytest.raises(ValueError, match=r"rope scaling has keys this library does not know: \['short_factor'\]"):
        ModelConfig.from_hf(config | {"rope_parameters": parameters})


FAMILY_REFUSED = {
    "V2 normalised": ("V2-Lite", {"norm_topk_prob": True}, "norm_topk_prob: got True"),
    "V2 method": ("V2-Lite", {"topk_method": "noaux_tc"}, "got 'noaux_tc', expected 'greedy' or"),
    "V2 groups missing": (
        "V2-Lite",
        {"topk_method": "group_limited_greedy", "n_group": None},
        "integer n_group >= 1",
    ),
    "V2 with MTP": ("V2-Lite", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers: got 1"),
    "V2 scoring": ("V2-Lite", {"scoring_func": "sigmoid"}, "scoring_func: got 'sigmoid'"),
    "dense behind sparse": (
        "GLM-4.7-Flash",
        {"mlp_layer_types": ["sparse"] * 46 + ["dense"]},
        "mlp_layer_types: got .* 'dense' ones first",
    ),
    "too few layer types": ("V3.2", {"mlp_layer_types": ["dense"] * 3}, "expected num_hidden_layers entries"),
    "layer types no list": ("V3.2", {"mlp_layer_types": 3}, "mlp_layer_types: got 3"),
    "two counts of dense layers": (
        "V3.2",
        {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 59},
        "got first_k_dense_replace 3 beside 2 dense layers",
    ),
    "partial rotary": ("GLM-4.7-Flash", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5"),
    "null index_topk": ("V3.2", {"index_topk": 0}, r"an integer index_topk \(or null\) >= 1, got 0"),
    "half-split V3.2": ("V3.2", {"rope_interleave": False}, "rope_interleave: got False"),
    "zero experts": ("LongCat-Flash", {"zero_expert_type": "copy"}, "zero_expert_type: got 'copy'"),
    "router bias": ("LongCat-Flash", {"router_bias": True}, "router_bias: got True"),
    "two LongCat modules": ("LongCat-Flash", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: got 2"),
    "no rank to scale by": ("LongCat-Flash", {"q_lora_rank": None}, "expected a q_lora_rank to scale by"),
    "Mistral groups": ("Mistral 4", {"n_group": 4}, "n_group: got 4"),
    "Mistral's factor": (
        "Mistral 4",
        {"rope_parameters": RELEASED["Mistral 4"]["rope_parameters"] | {"partial_rotary_factor": 1.0}},
        "partial_rotary_factor: got 1.0, expected 0.5",
    ),
    "query scaling elsewhere": (
        "R1",
        {"rope_scaling": RELEASED["R1"]["rope_scaling"] | {"llama_4_scaling_beta": 0.1}},
        r"does not know: \['llama_4_scaling_beta'\]",
    ),
}


@pytest.mark.parametrize(("name", "changes", "message"), FAMILY_REFUSED.values(), ids=FAMILY_REFUSED)
def test_values_a_family_cannot_honour_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(RELEASED[name] | changes)


# --- Refusals -----------------------------------------------------------------------------------------------------


def test_unknown_keys_are_refused_by_name():
    with pytest.raises(ValueError, match=r"does not know and will not guess at: \['index_topk', 'sliding_window'\]"):
        ModelConfig.from_hf(rnd_config(sliding_window=128, index_topk=2048))


@pytest.mark.parametrize("key", ["vocab_size", "q_lora_rank", "n_group", "num_hidden_layers", "norm_topk_prob"])
def test_missing_keys_are_refused_by_name(key):
    config = rnd_config()
    del config[key]
    with pytest.raises(ValueError, match=f"config.json lacks '{key}'"):
        ModelConfig.from_hf(config)


REFUSED = {
    "other model": (
        {"model_type": "llama"},
        "unsupported model_type: got 'llama', expected one of deepseek_v2, ",
    ),
    "no model": ({"model_type": None}, "unsupported model_type: got None"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected one of"),
    "scoring": ({"scoring_func": "softmax"}, "scoring_func: got 'softmax'"),
    "routing": ({"topk_method": "greedy"}, "topk_method: got 'greedy'"),
    "layer frequency": ({"moe_layer_freq": 2}, "moe_layer_freq: got 2"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout: got 0.1"),
    "list of models": ({"model_type": ["deepseek_v3"]}, r"unsupported model_type: got \['deepseek_v3'\]"),
    "MLP bias": ({"mlp_bias": True}, "mlp_bias: got True"),
    "zero size": ({"kv_lora_rank": 0}, "expected an integer kv_lora_rank >= 1, got 0"),
    "text for a size": ({"hidden_size": "64"}, "expected an integer hidden_size >= 1, got '64'"),
    "fraction for a size": ({"vocab_size": 64.0}, "expected an integer vocab_size >= 1, got 64.0"),
    "flag for a size": ({"num_hidden_layers": True}, "expected an integer num_layers >= 1, got True"),
    "null for a size": ({"n_shared_experts": None}, "expected an integer n_shared_experts >= 0, got None"),
    "zero queries": ({"q_lora_rank": 0}, r"expected an integer q_lora_rank \(or null\) >= 1, got 0"),
    "odd rope": ({"qk_rope_head_dim": 15}, "expected an even qk_rope_head_dim, got 15"),
    "negative MTP": ({"num_nextn_predict_layers": -1}, "expected an integer num_mtp_layers >= 0, got -1"),
    "null MTP": ({"num_nextn_predict_layers": None}, "expected an integer num_mtp_layers >= 0, got None"),
    "too many dense": ({"first_k_dense_replace": 4}, r"expected first_k_dense_replace in 0\.\.3, got 4"),
    "negative dense": ({"first_k_dense_replace": -1}, "expected an integer first_k_dense_replace >= 0, got -1"),
    "number for a flag": ({"norm_topk_prob": 1}, "expected norm_topk_prob true or false, got 1"),
    "null for a flag": ({"tie_word_embeddings": None}, "expected tie_word_embeddings true or false, got None"),
    "epsilon": ({"rms_norm_eps": 0}, "expected a number rms_norm_eps > 0.0, got 0"),
    "infinite scale": (
        {"routed_scaling_factor": float("inf")},
        "expected a number routed_scaling_factor > 0.0, got inf",
    ),
    "no experts": ({"n_routed_experts": 0}, "expected at least one routed expert"),
    "uneven groups": ({"n_group": 3}, "expected n_group dividing 8 experts, got 3"),
    "null groups": ({"n_group": None}, "expected an integer n_group >= 1, got None"),
    "too many groups": ({"n_group": 2, "topk_group": 3}, r"expected topk_group in 1\.\.2, got 3"),
    "groups of one": ({"n_group": 8}, "expected two experts or more a group, got 1"),
    "unreachable": ({"n_group": 4, "num_experts_per_tok": 3}, r"expected num_experts_per_tok in 1\.\.2, got 3"),
    "EOS outside": ({"eos_token_id": 128}, "expected eos_token_id below vocab_size 128, got 128"),
    "EOS as text": ({"eos_token_id": "</s>"}, "expected an integer eos_token_id >= 0, got '</s>'"),
    "negative EOS": ({"eos_token_id": [1, -1]}, "expected an integer eos_token_id >= 0, got -1"),
}
ROPE_REFUSED = {
    "type": ({"type": "linear", "factor": 2}, r"rope scaling: got type \['linear'\]"),
    "two types": ({"type": "yarn", "rope_type": "default"}, r"rope scaling: got type \['default', 'yarn'\]"),
    "no type": ({"factor": 2}, r"rope scaling: got type \['default'\] with {'factor': 2}"),
    "unknown key": (
        YARN | {"short_factor": [1]},
        r"rope scaling has keys this library does not know: \['short_factor'\]",
    ),
    "no factor": ({"type": "yarn"}, "expected factor in YaRN's rope scaling, got none"),
    "no original": ({"type": "yarn", "factor": 4}, "expected original_max_position_embeddings in YaRN's"),
    "small factor": (YARN | {"factor": 0.5}, "expected a number YaRN factor >= 1.0, got 0.5"),
    "text factor": (YARN | {"factor": "40"}, "expected a number YaRN factor >= 1.0, got '40'"),
    "betas": (YARN | {"beta_fast": 1, "beta_slow": 32}, "expected a number YaRN beta_fast >= 32, got 1"),
    "mscale": (YARN | {"mscale": -1.0}, "expected a number YaRN mscale >= 0.0, got -1.0"),
    "truncate": (YARN | {"truncate": "no"}, "expected YaRN truncate true or false, got 'no'"),
    "not an object": (["yarn"], "expected an object for rope scaling, got"),
    "two thetas": (YARN | {"rope_theta": 5.0}, r"expected one rope_theta, got \[5.0, 10000.0\]"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(rnd_config(**changes))


@pytest.mark.parametrize(("scaling", "message"), ROPE_REFUSED.values(), ids=ROPE_REFUSED)
def test_rope_values_are_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(rnd_config(rope_scaling=scaling))


@pytest.mark.parametrize("theta", [0, 1.0, None, "big", float("nan")])
def test_rope_theta_is_checked(theta):
    config = new_form(rnd_config())
    config["rope_parameters"] |= {"rope_theta": theta}
    if theta is None:
        # Absent and null are the default of the original code.
        assert ModelConfig.from_hf(config).rope.theta == 10000.0
        return
    with pytest.raises(ValueError, match=r"expected a number rope_theta > 1\.0"):
        ModelConfig.from_hf(config)


def test_two_rope_forms_at_once_are_refused():
    both = new_form(rnd_config()) | {"rope_scaling": YARN}
    with pytest.raises(ValueError, match="expected one of rope_parameters and rope_scaling, got both"):
        ModelConfig.from_hf(both)


def test_router_is_unchecked_where_there_is_none():
    dense = rnd_config(first_k_dense_replace=3, num_nextn_predict_layers=0, n_routed_experts=0, n_group=1)
    assert ModelConfig.from_hf(dense).num_moe_layers == 0


def test_configs_are_frozen_and_hashable():
    config = ModelConfig.from_hf(rnd_config())
    assert len({config, dataclasses.replace(config), ModelConfig.from_hf(rnd_config(rope_scaling=YARN))}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_speculative_tokens": -1}, r"num_speculative_tokens in 0\.\.64, got -1"),
        ({"num_speculative_tokens": 65}, r"num_speculative_tokens in 0\.\.64, got 65"),
        ({"num_speculative_tokens": True}, "an integer num_speculative_tokens, got True"),
        ({"num_speculative_tokens": 2.0}, "an integer num_speculative_tokens, got 2.0"),
        ({"method": "eagle"}, "speculative method 'mtp', got 'eagle'"),
        ({"verification": "typical"}, "verification one of .* got 'typical'"),
    ],
)
def test_speculative_values_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**fields)


def test_zero_drafts_is_a_value():
    assert SpeculativeConfig(num_speculative_tokens=0).num_speculative_tokens == 0
