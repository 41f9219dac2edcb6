"""GLM-4.7-Flash: DeepSeek-V3's layers, the first one dense, MTP after the trunk."""

import dataclasses

from jaxspec.families import deepseek_v3
from jaxspec.families.base import leading_dense_layers, same

FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    required={k: v for k, v in deepseek_v3.FAMILY.required.items() if k != "first_k_dense_replace"},
    derive=lambda config: leading_dense_layers(config, default=1),
    derived=same("first_k_dense_replace"),
    fixed=deepseek_v3.FAMILY.fixed | {"partial_rotary_factor": (1,)},
    irrelevant=frozenset({"mlp_layer_types"}),
)
