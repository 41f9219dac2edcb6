"""Frozen, validated configurations: the model's, the cache's and the speculation's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from jaxspec.families import FAMILIES, Family


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN context extension (arXiv:2309.00071) with DeepSeek's two magnitude corrections.

    `mscale / mscale_all_dim` scales cos and sin; `mscale_all_dim` squared scales the softmax. With
    `llama_4_scaling_beta`, queries grow with the logarithm of how often the original context fits before them.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    llama_4_scaling_beta: float | None = None

    def __post_init__(self) -> None:
        _require_number("YaRN factor", self.factor, at_least=1.0)
        _require_integer("YaRN original_max_position_embeddings", self.original_max_position_embeddings, at_least=1)
        _require_number("YaRN beta_slow", self.beta_slow, above=0.0)
        _require_number("YaRN beta_fast", self.beta_fast, at_least=self.beta_slow)
        for name in ("mscale", "mscale_all_dim", "attention_factor", "llama_4_scaling_beta"):
            if getattr(self, name) is not None:
                _require_number(f"YaRN {name}", getattr(self, name), at_least=0.0)
        _require_flag("YaRN truncate", self.truncate)

    def magnitude(self, mscale: float) -> float:
        """0.1 * mscale * ln(factor) + 1, or 1 where the context is not extended."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base, pairing (adjacent when interleaved) and optional YaRN."""

    theta: float = 10000.0
    interleave: bool = True
    yarn: YarnConfig | None = None

    def __post_init__(self) -> None:
        _require_number("rope_theta", self.theta, above=1.0)
        _require_flag("rope_interleave", self.interleave)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a model with multi-head latent attention, by the field's names. All sizes are in elements.

    Attributes without a line below are those of config.json; `jaxspec/families` maps the ones named differently.

    Attributes:
        scoring_func: "sigmoid" or "softmax", of the router's logits.
        topk_method: "noaux_tc" chooses experts by score plus bias, and groups by the sum of their two best;
            "group_limited_greedy" by score alone, and groups by their best; "greedy" knows no groups.
        zero_expert_num: experts after the routed ones that hand on their input.
        shortcut_moe: a layer is two blocks of attention and dense MLP, and its experts branch off between them.
        mla_scale_q_lora: queries are multiplied by the root of hidden_size / q_lora_rank.
        mla_scale_kv_lora: latents, likewise, by the root of hidden_size / kv_lora_rank.
        index_topk: tokens that sparse attention attends to; within as many of context it is dense. None: dense.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    first_k_dense_replace: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    num_mtp_layers: int
    initializer_range: float
    eos_token_ids: tuple[int, ...]

    scoring_func: Literal["sigmoid", "softmax"] = "sigmoid"
    topk_method: Literal["noaux_tc", "group_limited_greedy", "greedy"] = "noaux_tc"
    zero_expert_num: int = 0
    shortcut_moe: bool = False
    mla_scale_q_lora: bool = False
    mla_scale_kv_lora: bool = False
    index_topk: int | None = None

    # The latent norms ignore rms_norm_eps in DeepSeek's code and in transformers alike.
    latent_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in _POSITIVE.split():
            _require_integer(name, getattr(self, name), at_least=1)
        counts = "n_routed_experts n_shared_experts num_mtp_layers first_k_dense_replace zero_expert_num"
        for name in counts.split():
            _require_integer(name, getattr(self, name), at_least=0)
        for name in ("q_lora_rank", "index_topk"):
            if getattr(self, name) is not None:
                _require_integer(f"{name} (or null)", getattr(self, name), at_least=1)
        _require(not self.mla_scale_q_lora or self.q_lora_rank is not None, "a q_lora_rank to scale by", None)
        for name in "rms_norm_eps latent_norm_eps routed_scaling_factor".split():
            _require_number(name, getattr(self, name), above=0.0)
        _require_number("initializer_range", self.initializer_range, at_least=0.0)
        flags = "norm_topk_prob tie_word_embeddings attention_bias shortcut_moe mla_scale_q_lora mla_scale_kv_lora"
        for name in flags.split():
            _require_flag(name, getattr(self, name))
        for eos in self.eos_token_ids:
            _require_integer("eos_token_id", eos, at_least=0)
            _require(eos < self.vocab_size, f"eos_token_id below vocab_size {self.vocab_size}", eos)
        _require(self.qk_rope_head_dim % 2 == 0, "an even qk_rope_head_dim", self.qk_rope_head_dim)
        dense = self.first_k_dense_replace
        _require(dense <= self.num_layers, f"first_k_dense_replace in 0..{self.num_layers}", dense)
        if self.num_moe_layers or (self.num_mtp_layers and self.mtp_moe):
            self._check_router()

    def _check_router(self) -> None:
        scores, methods = ("sigmoid", "softmax"), ("noaux_tc", "group_limited_greedy", "greedy")
        _require(self.scoring_func in scores, f"scoring_func one of {scores}", repr(self.scoring_func))
        _require(self.topk_method in methods, f"topk_method one of {methods}", repr(self.topk_method))
        for name in "moe_intermediate_size num_experts_per_tok n_group topk_group".split():
            _require_integer(name, getattr(self, name), at_least=1)
        experts, groups = self.n_routed_experts, self.n_group
        _require(experts >= 1, "at least one routed expert (n_routed_experts)", experts)
        _require(experts % groups == 0, f"n_group dividing {experts} experts", groups)
        _require(self.topk_group <= groups, f"topk_group in 1..{groups}", self.topk_group)
        pairs = self.topk_method == "noaux_tc" and groups > 1
        _require(not pairs or experts // groups >= 2, "two experts or more a group", experts // groups)
        _require(groups == 1 or self.topk_method != "greedy", "n_group 1 with topk_method 'greedy'", groups)
        _require(groups == 1 or not self.zero_expert_num, "n_group 1 beside zero experts", groups)
        reachable = self.topk_group * (experts // groups) + self.zero_expert_num
        chosen = self.num_experts_per_tok
        _require(chosen <= reachable, f"num_experts_per_tok in 1..{reachable}", chosen)

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head: the part without position and the rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_moe_layers(self) -> int:
        """Trunk layers with routed experts; the first `first_k_dense_replace` have a dense MLP."""
        return self.num_layers - self.first_k_dense_replace

    @property
    def num_trunk_attentions(self) -> int:
        """Attention blocks of the trunk, each with a slice of the KV pools of its own."""
        return self.num_layers * (2 if self.shortcut_moe else 1)

    @property
    def num_cached_layers(self) -> int:
        """Layers that own a slice of the KV pools: the trunk's, then the MTP modules'."""
        return self.num_trunk_attentions + self.num_mtp_layers

    @property
    def mtp_moe(self) -> bool:
        """Whether MTP modules have routed experts. LongCat's have a dense MLP."""
        return not self.shortcut_moe

    @property
    def family(self) -> Family:
        """How the family's files are written."""
        return FAMILIES[self.model_type]

    @property
    def ignored_tensors(self) -> str:
        """A regular expression of stored tensors that are known and not read; empty for none."""
        return self.family.ignored_tensors(self)

    @property
    def latent_multiplier(self) -> float:
        """Factor on the normalised latents."""
        return (self.hidden_size / self.kv_lora_rank) ** 0.5 if self.mla_scale_kv_lora else 1.0

    def check_context(self, name: str, length: int) -> None:
        """Refuses a context in which sparse attention would differ from the dense one computed here.

        Raises:
            ValueError: `length`, called `name` in the message, is beyond `index_topk`.
        """
        if self.index_topk is not None and length > self.index_topk:
            raise ValueError(
                f"{self.model_type}: sparse attention is not implemented, and equals dense attention only while the "
                f"context is within index_topk: got {name} {length}, expected at most {self.index_topk}"
            )

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim ** -0.5, times the YaRN magnitude of `mscale_all_dim` squared, times the factor on queries."""
        scale = self.qk_head_dim**-0.5
        if self.mla_scale_q_lora:
            scale *= (self.hidden_size / self.q_lora_rank) ** 0.5
        if self.rope.yarn is not None and self.rope.yarn.mscale_all_dim:
            scale *= self.rope.yarn.magnitude(self.rope.yarn.mscale_all_dim) ** 2
        return scale

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Reads a Hugging Face config.json in the released key form or in transformers 5's.

        Raises:
            ValueError: a missing key, a key this library does not know, or a value it cannot honour.
        """
        model_type = config.get("model_type")
        family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None:
            raise ValueError(f"unsupported model_type: got {model_type!r}, expected one of {', '.join(FAMILIES)}")
        _check_keys(config, family)
        try:
            fields = {ours: config[theirs] for ours, theirs in family.required.items()}
        except KeyError as error:
            raise ValueError(f"config.json lacks {error.args[0]!r}") from None
        fields |= {ours: config.get(theirs, default) for ours, (theirs, default) in family.optional.items()}
        fields |= family.derive(config) | family.implied
        eos = (generation_config or {}).get("eos_token_id", config.get("eos_token_id"))
        rope = _read_rope(config, family)
        return cls(model_type=model_type, rope=rope, eos_token_ids=_as_tuple(eos), **fields)

    def to_hf(self, dtype: str) -> dict[str, Any]:
        """config.json of this architecture, with released key names, readable by transformers too."""
        family, yarn = self.family, self.rope.yarn
        keys = {**family.required, **family.derived, **{ours: key for ours, (key, _) in family.optional.items()}}
        scaling = None
        if yarn is not None:
            scaling = {"type": "yarn"} | {k: v for k, v in dataclasses.asdict(yarn).items() if v is not None}
        return {theirs: getattr(self, ours) for ours, theirs in keys.items()} | {
            "model_type": self.model_type,
            "architectures": [family.architecture],
            "torch_dtype": dtype,
            "num_key_value_heads": self.num_heads,
            "hidden_act": "silu",
            "rope_theta": self.rope.theta,
            "rope_interleave": self.rope.interleave,
            "rope_scaling": scaling,
            "eos_token_id": list(self.eos_token_ids) or None,
            "bos_token_id": None,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are proposed and verified.

    Args:
        method: "mtp", the checkpoint's own multi-token-prediction modules.
        num_speculative_tokens: K, drafts a round; 0 decodes one token a round.
        verification: "coupled", whose output is a function of model, prompt and seed alone, or
            "rejection", which accepts more often at the price of that property.
        draft_len_schedule: K by batch size, as in TensorRT-LLM: with {4: 3, 16: 1}, up to 4 rows draft 3 tokens a
            round, up to 16 draft 1, and more draft none. None: `num_speculative_tokens` for any.
        acceptance_rate_window_size: over how many rounds with drafts the gate averages; None: no gate.
        acceptance_rate_threshold: below this mean share of drafts that are accepted (in 0..1) the gate turns drafting
            off for good, as TensorRT-LLM's does.
    """

    method: Literal["mtp"] = "mtp"
    num_speculative_tokens: int = 3
    verification: Literal["coupled", "rejection"] = "coupled"
    draft_len_schedule: Mapping[int, int] | Sequence[tuple[int, int]] | None = None
    acceptance_rate_window_size: int | None = None
    acceptance_rate_threshold: float | None = None

    def __post_init__(self) -> None:
        _require(self.method in ("mtp",), "speculative method 'mtp'", repr(self.method))
        k = self.num_speculative_tokens
        _require(isinstance(k, int) and not isinstance(k, bool), "an integer num_speculative_tokens", repr(k))
        _require(0 <= k <= 64, "num_speculative_tokens in 0..64", k)
        rules = ("coupled", "rejection")
        _require(self.verification in rules, f"verification one of {rules}", repr(self.verification))
        if self.draft_len_schedule is not None:
            # A tuple of pairs, so that the instance is immutable and hashable throughout.
            object.__setattr__(self, "draft_len_schedule", self._sorted_schedule())
        window, threshold = self.acceptance_rate_window_size, self.acceptance_rate_threshold
        both = "both acceptance_rate_window_size and acceptance_rate_threshold, or neither"
        _require((window is None) == (threshold is None), both, (window, threshold))
        if window is not None:
            _require_integer("acceptance_rate_window_size", window, at_least=1)
            _require_number("acceptance_rate_threshold", threshold, at_least=0.0)
            _require(threshold <= 1, "acceptance_rate_threshold in 0..1", threshold)

    @property
    def for_programs(self) -> SpeculativeConfig:
        """This speculation without what only the host looks at, so that such options compile no other programs."""
        return dataclasses.replace(
            self, draft_len_schedule=None, acceptance_rate_window_size=None, acceptance_rate_threshold=None
        )

    def _sorted_schedule(self) -> tuple[tuple[int, int], ...]:
        given, expected = self.draft_len_schedule, "a draft_len_schedule that maps batch sizes to draft lengths"
        pairs = given.items() if isinstance(given, Mapping) else given
        _require(isinstance(pairs, Iterable) and not isinstance(pairs, (str, bytes)), expected, repr(given))
        pairs = tuple(pairs)
        is_pair = all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs)
        _require(is_pair and len(pairs) > 0, expected, repr(given))
        for rows, num_drafts in pairs:
            _require_integer("batch size in draft_len_schedule", rows, at_least=1)
            _require_integer("draft length in draft_len_schedule", num_drafts, at_least=0)
            most = f"draft_len_schedule within num_speculative_tokens {self.num_speculative_tokens}"
            _require(num_drafts <= self.num_speculative_tokens, most, num_drafts)
        _require(len({rows for rows, _ in pairs}) == len(pairs), "each batch size once in draft_len_schedule", given)
        return tuple(sorted((rows, num_drafts) for rows, num_drafts in pairs))


def _require(ok: bool, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"expected {expected}, got {got}")


def _require_integer(name: str, value: object, *, at_least: int) -> None:
    # A bool is an int to Python, but not to the author of a config.json.
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
    _require(ok, f"an integer {name} >= {at_least}", repr(value))


def _require_number(name: str, value: object, *, at_least: float = -math.inf, above: float = -math.inf) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    bound = f"> {above}" if math.isfinite(above) else f">= {at_least}"
    _require(ok and value >= at_least and value > above, f"a number {name} {bound}", repr(value))


def _require_flag(name: str, value: object) -> None:
    _require(isinstance(value, bool), f"{name} true or false", repr(value))


def _as_tuple(ids: Any) -> tuple[Any, ...]:
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)


_POSITIVE = (
    "vocab_size hidden_size num_layers num_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "intermediate_size max_position_embeddings"
)


def _check_keys(config: Mapping[str, Any], family: Family) -> None:
    unknown = sorted(set(config) - family.known_keys())
    if unknown:
        raise ValueError(f"config.json has keys this library does not know and will not guess at: {unknown}")
    for key, allowed in family.fixed.items():
        if key in config and config[key] not in allowed:
            raise ValueError(f"config.json: {key}: got {config[key]!r}, expected one of {allowed}")


def _read_rope(config: Mapping[str, Any], family: Family) -> RopeConfig:
    """Both forms: rope_theta with rope_scaling, or rope_parameters with rope_theta inside."""
    forms = [config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    _require(len(forms) <= 1, "one of rope_parameters and rope_scaling", "both")
    scaling = forms[0] if forms else {}
    _require(isinstance(scaling, Mapping), "an object for rope scaling", repr(scaling))
    thetas = {form["rope_theta"] for form in (scaling, config) if form.get("rope_theta") is not None} or {
        family.default_theta
    }
    _require(len(thetas) == 1, "one rope_theta", sorted(thetas))
    scaling = {key: value for key, value in scaling.items() if key != "rope_theta"}
    kind = {scaling.pop("rope_type", None), scaling.pop("type", None)} - {None} or {"default"}
    rope = RopeConfig(theta=thetas.pop(), interleave=config.get("rope_interleave", True))
    if kind == {"default"} and not scaling:
        return rope
    if kind != {"yarn"}:
        raise ValueError(f"rope scaling: got type {sorted(kind)} with {scaling}, expected 'default' or 'yarn'")
    return dataclasses.replace(rope, yarn=_read_yarn(scaling, family))


def _read_yarn(scaling: Mapping[str, Any], family: Family) -> YarnConfig:
    """YaRN's keys. A null stands for the default, as it does in files that transformers writes."""
    fields = {field.name for field in dataclasses.fields(YarnConfig)}
    unknown = sorted(scaling.keys() - (fields - {"llama_4_scaling_beta"}) - family.rope_keys)
    if unknown:
        raise ValueError(f"rope scaling has keys this library does not know: {unknown}")
    given = {key: value for key, value in scaling.items() if value is not None and key in fields}
    for key in ("factor", "original_max_position_embeddings"):
        _require(key in given, f"{key} in YaRN's rope scaling", "none")
    return YarnConfig(**given)
