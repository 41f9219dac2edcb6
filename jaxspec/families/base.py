"""How a model family's files are written: the keys of its config.json, and stored tensors that are not needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


def same(names: str) -> dict[str, str]:
    """Fields whose config.json key has the field's own name."""
    return {name: name for name in names.split()}


def nothing(_: Any) -> Mapping[str, Any]:
    """Derives no field."""
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of config.json. Every key of a file must be named here; any other is refused.

    Attributes:
        model_type: as config.json gives it.
        architecture: the class in transformers that runs such files.
        required: `ModelConfig` field to the key that must be there.
        optional: field to key, and the value that transformers takes where the key is left out.
        derive: fields that take more than one key to know. Raises ValueError for what cannot be honoured.
        derived: field to key, for the fields that `derive` gives.
        implied: values of fields that no key gives.
        fixed: key to the values that this library honours.
        irrelevant: keys that do not bear on the computation, or that repeat others.
        rope_keys: keys of rope scaling beyond YaRN's own.
        default_theta: rotary base where the file gives none.
        ignored_tensors: from a `ModelConfig`, a regular expression of stored tensors that are not read.
        fused_experts: all experts of a layer are stored as one tensor, gate and up joined.
    """

    model_type: str
    architecture: str
    required: Mapping[str, str]
    optional: Mapping[str, tuple[str, Any]]
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] = nothing
    derived: Mapping[str, str] = dataclasses.field(default_factory=dict)
    implied: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    irrelevant: frozenset[str] = frozenset()
    rope_keys: frozenset[str] = frozenset()
    default_theta: float = 10000.0
    ignored_tensors: Callable[[Any], str] = lambda _: ""
    fused_experts: bool = False

    def known_keys(self) -> set[str]:
        """Every key a file may have."""
        named = {*self.required.values(), *(key for key, _ in self.optional.values()), *self.derived.values()}
        return named | self.fixed.keys() | self.irrelevant | ROPE_KEYS | COMMON_IRRELEVANT


ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "rope_interleave"}
# The storage format is the checkpoint reader's to judge; the rest is training's, serving's or a repetition.
COMMON_IRRELEVANT = set(
    "quantization_config model_type architectures auto_map torch_dtype dtype transformers_version use_cache "
    "bos_token_id eos_token_id pad_token_id num_key_value_heads qk_head_dim head_dim ep_size pretraining_tp "
    "aux_loss_alpha seq_aux _name_or_path id2label label2id problem_type return_dict output_hidden_states "
    "output_attentions _attn_implementation _experts_implementation".split()
)

# --- What most families share -------------------------------------------------------------------------------------

ATTENTION = same(
    "vocab_size hidden_size q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rms_norm_eps "
    "max_position_embeddings"
) | {"num_heads": "num_attention_heads"}
TRUNK = ATTENTION | same("intermediate_size") | {"num_layers": "num_hidden_layers"}
EXPERTS = same("moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok routed_scaling_factor")
GROUPS = same("n_group topk_group")
OPTIONAL = {
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "attention_bias": ("attention_bias", False),
    "initializer_range": ("initializer_range", 0.02),
}
MTP = {"num_mtp_layers": ("num_nextn_predict_layers", 0)}
FIXED = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "mlp_bias": (False,),
    "output_router_logits": (False,),
    "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
}
SIGMOID_ROUTER = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}


def leading_dense_layers(config: Mapping[str, Any], default: int) -> Mapping[str, Any]:
    """`first_k_dense_replace`, which transformers 5 spells as a list `mlp_layer_types` too.

    Raises:
        ValueError: the two disagree, or dense layers stand elsewhere than in front.
    """
    kinds, given = config.get("mlp_layer_types"), config.get("first_k_dense_replace")
    if kinds is None:
        return {"first_k_dense_replace": default if given is None else given}
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if (
        not isinstance(kinds, list)
        or len(kinds) != config.get("num_hidden_layers")
        or kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense)
    ):
        raise ValueError(
            f"config.json: mlp_layer_types: got {kinds!r:.200}, expected num_hidden_layers entries, "
            "'dense' ones first and then 'sparse' ones"
        )
    if given is not None and given != dense:
        raise ValueError(
            f"config.json: got first_k_dense_replace {given} beside {dense} dense layers in mlp_layer_types, "
            "expected one number"
        )
    return {"first_k_dense_replace": dense}
