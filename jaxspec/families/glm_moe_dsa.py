"""GLM-5: DeepSeek-V3.2's layers; several layers may share one indexer, which matters beyond index_topk only."""

import dataclasses

from jaxspec.families import deepseek_v32

SHARED_INDEXERS = (
    "indexer_types index_topk_freq index_skip_topk_offset index_topk_pattern index_share_for_mtp_iteration"
)

FAMILY = dataclasses.replace(
    deepseek_v32.FAMILY,
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    fixed=deepseek_v32.FAMILY.fixed | {"partial_rotary_factor": (1,)},
    irrelevant=deepseek_v32.FAMILY.irrelevant | set(SHARED_INDEXERS.split()),
)
