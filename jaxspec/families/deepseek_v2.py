"""DeepSeek-V2 and V2-Lite: softmax router, groups by their best expert, no MTP."""

from collections.abc import Mapping
from typing import Any

from jaxspec.families.base import EXPERTS, FIXED, OPTIONAL, TRUNK, Family, same


def _router(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without groups (V2-Lite) the files hold either null or a number that the method passes over."""
    method = config.get("topk_method", "greedy")
    if method == "greedy":
        return {"topk_method": method, "n_group": 1, "topk_group": 1}
    if method != "group_limited_greedy":
        raise ValueError(
            f"config.json: topk_method: got {method!r}, expected 'greedy' or 'group_limited_greedy' for deepseek_v2"
        )
    return {"topk_method": method, "n_group": config.get("n_group"), "topk_group": config.get("topk_group")}


FAMILY = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    required=TRUNK | EXPERTS | same("first_k_dense_replace"),
    optional=OPTIONAL,
    derive=_router,
    derived=same("topk_method n_group topk_group"),
    implied={"scoring_func": "softmax", "norm_topk_prob": False, "num_mtp_layers": 0},
    # With norm_topk_prob, the released code and transformers' would differ.
    fixed=FIXED
    | {
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),
        "moe_layer_freq": (1,),
        "rope_interleave": (True,),
        "num_nextn_predict_layers": (0,),
    },
)
