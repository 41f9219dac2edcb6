"""config.json: both key forms read alike, and nothing is guessed."""

import dataclasses
import json

import pytest
from fixtures import YARN, rnd_config

from jaxspec.config import ModelConfig, SpeculativeConfig


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
    "other model": ({"model_type": "llama"}, "unsupported model_type: got 'llama', expected 'deepseek_v3'"),
    "no model": ({"model_type": None}, "unsupported model_type: got None"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected one of"),
    "scoring": ({"scoring_func": "softmax"}, "scoring_func: got 'softmax'"),
    "routing": ({"topk_method": "greedy"}, "topk_method: got 'greedy'"),
    "layer frequency": ({"moe_layer_freq": 2}, "moe_layer_freq: got 2"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout: got 0.1"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: got"),
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
