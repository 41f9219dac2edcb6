"""LongCat-Flash: two attention blocks a layer, a shortcut past the second for the experts, experts that do nothing.

An expert of the last `zero_expert_num` hands on its input. transformers stores (unused) gate and up projections for
these too. The MTP module is one dense layer, under names of its own (vLLM, longcat_flash_mtp.py).
"""

from typing import Any

from jaxspec.families.base import ATTENTION, FIXED, OPTIONAL, Family, same


def _weights_of_zero_experts(config: Any) -> str:
    ids = range(config.n_routed_experts, config.n_routed_experts + config.zero_expert_num)
    return rf"model\.layers\.\d+\.mlp\.experts\.({'|'.join(map(str, ids))})\.(gate|up)_proj\.weight" if ids else ""


FAMILY = Family(
    model_type="longcat_flash",
    architecture="LongcatFlashForCausalLM",
    required=ATTENTION
    | same("num_layers n_routed_experts routed_scaling_factor zero_expert_num")
    | {
        "num_experts_per_tok": "moe_topk",
        "intermediate_size": "ffn_hidden_size",
        "moe_intermediate_size": "expert_ffn_hidden_size",
    },
    optional=OPTIONAL
    | {
        "mla_scale_q_lora": ("mla_scale_q_lora", True),
        "mla_scale_kv_lora": ("mla_scale_kv_lora", True),
        "num_mtp_layers": ("num_nextn_predict_layers", 0),
    },
    implied={
        "scoring_func": "softmax",
        "n_shared_experts": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "shortcut_moe": True,
    },
    fixed=FIXED
    | {
        "attention_method": ("MLA",),
        "zero_expert_type": ("identity",),
        "norm_topk_prob": (False,),
        "router_bias": (False,),
        "rope_interleave": (True,),
        "num_nextn_predict_layers": (0, 1),
        "nextn_use_scmoe": (False,),
    },
    irrelevant=frozenset(
        "num_hidden_layers intermediate_size moe_intermediate_size params_dtype rounter_params_dtype "
        "router_dtype disable_quant_module".split()
    ),
    default_theta=10_000_000.0,
    ignored_tensors=_weights_of_zero_experts,
)
