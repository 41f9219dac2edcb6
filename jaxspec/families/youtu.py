"""Youtu-LLM: dense layers throughout, embedding and head tied unless the file says otherwise."""

from collections.abc import Mapping
from typing import Any

from jaxspec.families.base import FIXED, TRUNK, Family


def _all_dense(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"first_k_dense_replace": config.get("num_hidden_layers")}


FAMILY = Family(
    model_type="youtu",
    architecture="YoutuForCausalLM",
    required=TRUNK,
    optional={"tie_word_embeddings": ("tie_word_embeddings", True), "attention_bias": ("attention_bias", False)},
    derive=_all_dense,
    implied={
        "moe_intermediate_size": 0,
        "n_routed_experts": 0,
        "n_shared_experts": 0,
        "num_experts_per_tok": 0,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "num_mtp_layers": 0,
        "initializer_range": 0.02,
    },
    fixed=FIXED,
    irrelevant=frozenset({"initializer_range", "embedding_initializer_range"}),
)
