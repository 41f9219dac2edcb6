"""DeepSeek-V3, R1, V3.1: sigmoid router with a bias on the choice, MTP modules after the trunk."""

from jaxspec.families.base import EXPERTS, FIXED, GROUPS, MTP, OPTIONAL, SIGMOID_ROUTER, TRUNK, Family, same

FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    required=TRUNK | EXPERTS | GROUPS | same("first_k_dense_replace norm_topk_prob"),
    optional=OPTIONAL | MTP,
    fixed=FIXED | SIGMOID_ROUTER,
)
