"""Mistral 4: softmax router without groups, experts stored as one tensor, queries scaled by their position."""

from collections.abc import Mapping
from typing import Any

from jaxspec.families.base import EXPERTS, FIXED, OPTIONAL, TRUNK, Family, same


def _check_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Two keys inside rope_parameters repeat what other keys say."""
    rope, nope_dim, rope_dim = (config.get(k) for k in ("rope_parameters", "qk_nope_head_dim", "qk_rope_head_dim"))
    if isinstance(rope, Mapping) and isinstance(nope_dim, int) and isinstance(rope_dim, int):
        expected = {
            "max_position_embeddings": config.get("max_position_embeddings"),
            "partial_rotary_factor": rope_dim / max(1, nope_dim + rope_dim),
        }
        for key, value in expected.items():
            if rope.get(key, value) != value:
                raise ValueError(f"config.json: rope_parameters: {key}: got {rope[key]!r}, expected {value}")
    return {}


FAMILY = Family(
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    required=TRUNK | EXPERTS | same("first_k_dense_replace norm_topk_prob"),
    optional=OPTIONAL,
    derive=_check_rope,
    implied={"scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_mtp_layers": 0},
    fixed=FIXED
    | {"n_group": (1, None), "topk_group": (1, None), "moe_layer_freq": (1,), "num_nextn_predict_layers": (0,)},
    rope_keys=frozenset({"llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor"}),
    fused_experts=True,
)
