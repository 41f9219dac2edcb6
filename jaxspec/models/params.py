"""The parameters: each weight is declared once, here.

`param_specs` gives a `Params` tree whose leaves are `Weight` records (shape, Hugging Face name, sharding
axes, initialiser). Initialising, loading, saving, sharding and training all map over that tree, so no second
list of names or shapes exists.

Matrices are stored `[in, out]`, transposed from Hugging Face's `[out, in]`: XLA's CPU matmuls then cost the
same for one row as for four, which is what verifying drafts relies on. Layers of a kind are stacked on a leading
axis and scanned.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, PRNGKeyArray

from jaxspec.config import ModelConfig
from jaxspec.models.block_scaled import BlockScaled


@dataclasses.dataclass(frozen=True)
class Weight:
    """Declaration of one parameter array.

    Attributes:
        shape: the array's shape, stacked axes (layers, experts) first.
        axes: logical sharding axis of every dimension; None is never sharded.
        hf_name: name of the stored tensor, with `{layer}` and `{expert}` where axes are stacked.
        hf_shape: shape of one stored tensor.
        view: from one stored tensor to the numpy *view* of it that our array holds; reading takes the
            view, writing assigns to it, so both directions are this one function.
        stack: for each stacked axis, the placeholder in `hf_name` and the ids it runs over.
        init: standard deviation of a normal, or the constant of a constant initialiser.
        constant: whether `init` is a constant.
        dtype: fixed dtype, or None for the model's.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    hf_name: str
    hf_shape: tuple[int, ...]
    view: Callable[[np.ndarray], np.ndarray]
    stack: tuple[tuple[str, range], ...] = ()
    init: float = 0.02
    constant: bool = False
    dtype: Any = None

    def tensors(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yields (index on the stacked axes, stored name) for every stored tensor of this array."""
        names, ids = [name for name, _ in self.stack], [ids for _, ids in self.stack]
        for index in itertools.product(*(range(len(r)) for r in ids)):
            values = {name: r[i] for name, r, i in zip(names, ids, index, strict=True)}
            yield index, self.hf_name.format(**values)

    def initialise(self, key: PRNGKeyArray, dtype: Any) -> Array:
        """Draws the array."""
        dtype = self.dtype or dtype
        if self.constant:
            return jnp.full(self.shape, self.init, dtype)
        return (self.init * jax.random.normal(key, self.shape, jnp.float32)).astype(dtype)


@struct.dataclass
class Attention:
    """Multi-head latent attention. h heads, c latent, r rotary, n no-position and v value widths.

    `q_a` and `q_a_norm` are None when queries are not compressed, biases are None when the config has none.
    """

    q_a: Float[Array, "*l hidden q_lora"] | BlockScaled | None
    q_a_bias: Float[Array, "*l q_lora"] | None
    q_a_norm: Float[Array, "*l q_lora"] | None
    q_b: Float[Array, "*l q_in queries"] | BlockScaled
    kv_a: Float[Array, "*l hidden c_rope"] | BlockScaled
    kv_a_bias: Float[Array, "*l c_rope"] | None
    kv_a_norm: Float[Array, "*l c"]
    k_up: Float[Array, "*l h n c"]
    v_up: Float[Array, "*l h c v"]
    o: Float[Array, "*l values hidden"] | BlockScaled
    o_bias: Float[Array, "*l hidden"] | None


@struct.dataclass
class MLP:
    """SwiGLU feed-forward block."""

    gate: Float[Array, "*l hidden ffn"] | BlockScaled
    up: Float[Array, "*l hidden ffn"] | BlockScaled
    down: Float[Array, "*l ffn hidden"] | BlockScaled


@struct.dataclass
class MoE:
    """Routed experts (an MLP with an expert axis), their router, and the shared expert.

    `experts` is None in the one layer that a scan is at, where the whole stack's are passed beside it. The router
    scores the experts that hand on their input too, after the others.
    """

    router: Float[Array, "*l hidden experts"]
    router_bias: Float[Array, "*l experts"] | None
    experts: MLP | None
    shared: MLP | None


@struct.dataclass
class Layer:
    """One decoder layer, or a stack of them."""

    attn_norm: Float[Array, "*l hidden"]
    attn: Attention
    mlp_norm: Float[Array, "*l hidden"]
    mlp: MLP | MoE


@struct.dataclass
class ShortcutLayer:
    """LongCat's layer: two blocks of attention and dense MLP.

    The experts read what the first MLP reads, and are added after the second.
    """

    first: Layer
    second: Layer
    moe: MoE


@struct.dataclass
class MTP:
    """A stack of multi-token-prediction modules. `embed` and `head` are None where the trunk's serve."""

    embed: Float[Array, "*d vocab hidden"] | None
    enorm: Float[Array, "*d hidden"]
    hnorm: Float[Array, "*d hidden"]
    eh_proj: Float[Array, "*d joined hidden"] | BlockScaled
    layer: Layer
    norm: Float[Array, "*d hidden"]
    head: Float[Array, "*d hidden vocab"] | BlockScaled | None


@struct.dataclass
class Params:
    """All parameters. `dense` and `moe` are the trunk's two stacks, `head` is None when tied to `embed`."""

    embed: Float[Array, "vocab hidden"]
    dense: Layer | None
    moe: Layer | ShortcutLayer | None
    norm: Float[Array, "hidden"]
    head: Float[Array, "hidden vocab"] | BlockScaled | None
    mtp: MTP | None


def param_specs(config: ModelConfig, *, own_mtp_embed: bool = False, own_mtp_head: bool = False) -> Params:
    """The declaration of every weight of the model, as a `Params` tree with `Weight` leaves.

    Args:
        config: the architecture.
        own_mtp_embed: the MTP modules have an embedding of their own.
        own_mtp_head: the MTP modules have an output head of their own.
    """
    v, h, std = config.vocab_size, config.hidden_size, config.initializer_range
    dense, depth = config.first_k_dense_replace, config.num_layers
    top = _Stack("", (), std)
    return Params(
        embed=_embedding(top, "model.embed_tokens.weight", v, h),
        dense=_dense_layer(config, _trunk(config, range(dense))) if dense else None,
        moe=_moe_layers(config, _trunk(config, range(dense, depth))) if depth > dense else None,
        norm=top.norm("model.norm.weight", h),
        head=None if config.tie_word_embeddings else top.linear("lm_head.weight", h, v, ("embed", "vocab")),
        mtp=_mtp(config, own_mtp_embed, own_mtp_head) if config.num_mtp_layers else None,
    )


def experts_of(stack: Layer | ShortcutLayer) -> MLP | None:
    """The routed experts of a stack of layers."""
    moe = stack.moe if isinstance(stack, ShortcutLayer) else stack.mlp
    return moe.experts if isinstance(moe, MoE) else None


def without_experts(stack: Layer | ShortcutLayer) -> Layer | ShortcutLayer:
    """The rest of it, which can be scanned without slicing (and copying) the experts of a layer."""
    if isinstance(stack, ShortcutLayer):
        return stack.replace(moe=stack.moe.replace(experts=None))
    return stack.replace(mlp=stack.mlp.replace(experts=None)) if isinstance(stack.mlp, MoE) else stack


def init_params(config: ModelConfig, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Params:
    """Random parameters, for training and tests; weights draw in the order of the declaration."""
    specs, tree = jax.tree.flatten(param_specs(config))
    keys = jax.random.split(key, len(specs))
    return jax.tree.unflatten(tree, [w.initialise(k, dtype) for w, k in zip(specs, keys, strict=True)])


def count_params(params: Params) -> int:
    """Number of elements, of arrays or of declarations."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Declares weights that share a name prefix and stacked axes."""

    prefix: str
    stack: tuple[tuple[str, range], ...]
    std: float

    def within(self, name: str) -> _Stack:
        return dataclasses.replace(self, prefix=self.prefix + name)

    def _weight(self, name, shape, axes, hf_shape, view, **kw) -> Weight:
        lengths = tuple(len(ids) for _, ids in self.stack)
        stacked = tuple(f"{placeholder}s" for placeholder, _ in self.stack)
        return Weight(
            shape=lengths + shape,
            axes=stacked + axes,
            hf_name=self.prefix + name,
            hf_shape=hf_shape,
            view=view,
            stack=self.stack,
            **{"init": self.std} | kw,
        )

    def norm(self, name: str, size: int) -> Weight:
        return self._weight(name, (size,), (None,), (size,), lambda x: x, init=1.0, constant=True)

    def bias(self, name: str, size: int, axis: str | None, dtype: Any = None) -> Weight:
        return self._weight(name, (size,), (axis,), (size,), lambda x: x, init=0.0, constant=True, dtype=dtype)

    def linear(self, name: str, fan_in: int, fan_out: int, axes: tuple, dtype: Any = None) -> Weight:
        shape = (fan_in, fan_out)
        return self._weight(name, shape, axes, (fan_out, fan_in), lambda x: x.T, dtype=dtype)


def _embedding(at: _Stack, name: str, vocab: int, hidden: int) -> Weight:
    return at._weight(name, (vocab, hidden), ("vocab", "embed"), (vocab, hidden), lambda x: x)


def _trunk(config: ModelConfig, layers: range) -> _Stack:
    return _Stack("model.layers.{layer}.", (("layer", layers),), config.initializer_range)


def _layer(config: ModelConfig, at: _Stack, mlp: MLP | MoE, block: str = "") -> Layer:
    """A layer around its MLP. `block` ends the names of norms and attention where a layer has several."""
    return Layer(
        attn_norm=at.norm(f"input_layernorm{block}.weight", config.hidden_size),
        attn=_attention(config, at.within(f"self_attn{block}.")),
        mlp_norm=at.norm(f"post_attention_layernorm{block}.weight", config.hidden_size),
        mlp=mlp,
    )


def _dense_layer(config: ModelConfig, at: _Stack, mlp: str = "mlp.", block: str = "") -> Layer:
    return _layer(config, at, _mlp(at.within(mlp), config.hidden_size, config.intermediate_size), block)


def _moe_layers(config: ModelConfig, at: _Stack) -> Layer | ShortcutLayer:
    if not config.shortcut_moe:
        return _layer(config, at, _moe(config, at.within("mlp."), "gate."))
    first, second = (_dense_layer(config, at, f"mlps.{block}.", f".{block}") for block in (0, 1))
    # Between router and weight LongCat's names have a part more than everyone's.
    return ShortcutLayer(first, second, _moe(config, at.within("mlp."), "router.", "classifier."))


def _attention(config: ModelConfig, at: _Stack) -> Attention:
    hidden, heads, latent, rope = config.hidden_size, config.num_heads, config.kv_lora_rank, config.qk_rope_head_dim
    nope, value, q_lora = config.qk_nope_head_dim, config.v_head_dim, config.q_lora_rank
    queries, biased = heads * config.qk_head_dim, config.attention_bias
    up_shape = (heads * (nope + value), latent)

    def per_head(x: np.ndarray) -> np.ndarray:
        return x.reshape(heads, nope + value, latent)

    def up(shape: tuple, axes: tuple, view: Callable) -> Weight:
        return at._weight("kv_b_proj.weight", shape, axes, up_shape, view)

    return Attention(
        q_a=None if q_lora is None else at.linear("q_a_proj.weight", hidden, q_lora, ("embed", None)),
        q_a_bias=at.bias("q_a_proj.bias", q_lora, None) if biased and q_lora else None,
        q_a_norm=None if q_lora is None else at.norm("q_a_layernorm.weight", q_lora),
        q_b=at.linear("q_proj.weight", hidden, queries, ("embed", "heads"))
        if q_lora is None
        else at.linear("q_b_proj.weight", q_lora, queries, (None, "heads")),
        kv_a=at.linear("kv_a_proj_with_mqa.weight", hidden, latent + rope, ("embed", None)),
        kv_a_bias=at.bias("kv_a_proj_with_mqa.bias", latent + rope, None) if biased else None,
        kv_a_norm=at.norm("kv_a_layernorm.weight", latent),
        k_up=up((heads, nope, latent), ("heads", None, None), lambda x: per_head(x)[:, :nope]),
        v_up=up((heads, latent, value), ("heads", None, None), lambda x: per_head(x)[:, nope:].transpose(0, 2, 1)),
        o=at.linear("o_proj.weight", heads * value, hidden, ("heads", "embed")),
        o_bias=at.bias("o_proj.bias", hidden, None) if biased else None,
    )


def _mlp(at: _Stack, hidden: int, ffn: int) -> MLP:
    return MLP(
        gate=at.linear("gate_proj.weight", hidden, ffn, ("embed", "mlp")),
        up=at.linear("up_proj.weight", hidden, ffn, ("embed", "mlp")),
        down=at.linear("down_proj.weight", ffn, hidden, ("mlp", "embed")),
    )


def _moe(config: ModelConfig, at: _Stack, router: str, classifier: str = "") -> MoE:
    hidden, ffn, shared = config.hidden_size, config.moe_intermediate_size, config.n_shared_experts
    scored, float32 = config.n_routed_experts + config.zero_expert_num, jnp.float32
    biased = config.topk_method == "noaux_tc"
    return MoE(
        router=at.linear(f"{router}{classifier}weight", hidden, scored, ("embed", None), dtype=float32),
        router_bias=at.bias(f"{router}e_score_correction_bias", scored, None, dtype=float32) if biased else None,
        experts=_fused_experts(config, at) if config.family.fused_experts else _experts(config, at),
        shared=_mlp(at.within("shared_experts."), hidden, shared * ffn) if shared else None,
    )


def _experts(config: ModelConfig, at: _Stack) -> MLP:
    every = dataclasses.replace(at, stack=(*at.stack, ("expert", range(config.n_routed_experts))))
    return _mlp(every.within("experts.{expert}."), config.hidden_size, config.moe_intermediate_size)


def _fused_experts(config: ModelConfig, at: _Stack) -> MLP:
    """All experts of a layer in one tensor, gate and up joined, as transformers has them in memory."""
    experts, hidden, ffn = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size

    def weight(name: str, fan_in: int, fan_out: int, axes: tuple, stored: int, view: Callable) -> Weight:
        shape, hf_shape = (experts, fan_in, fan_out), (experts, stored, fan_in)
        return at._weight(f"experts.{name}", shape, ("experts", *axes), hf_shape, view)

    inner, outer = ("embed", "mlp"), ("mlp", "embed")
    return MLP(
        gate=weight("gate_up_proj", hidden, ffn, inner, 2 * ffn, lambda x: x[:, :ffn].transpose(0, 2, 1)),
        up=weight("gate_up_proj", hidden, ffn, inner, 2 * ffn, lambda x: x[:, ffn:].transpose(0, 2, 1)),
        down=weight("down_proj", ffn, hidden, outer, hidden, lambda x: x.transpose(0, 2, 1)),
    )


def _mtp(config: ModelConfig, own_embed: bool, own_head: bool) -> MTP:
    hidden, vocab, modules = config.hidden_size, config.vocab_size, config.num_mtp_layers
    if config.shortcut_moe:
        return _longcat_mtp(config, own_embed)
    at = _trunk(config, range(config.num_layers, config.num_layers + modules))
    return MTP(
        embed=_embedding(at, "embed_tokens.weight", vocab, hidden) if own_embed else None,
        enorm=at.norm("enorm.weight", hidden),
        hnorm=at.norm("hnorm.weight", hidden),
        eh_proj=at.linear("eh_proj.weight", 2 * hidden, hidden, (None, "embed")),
        layer=_moe_layers(config, at),
        norm=at.norm("shared_head.norm.weight", hidden),
        head=at.linear("shared_head.head.weight", hidden, vocab, ("embed", "vocab")) if own_head else None,
    )


def _longcat_mtp(config: ModelConfig, own_embed: bool) -> MTP:
    """One module, under `model.mtp.`, whose layer is dense; its head is the trunk's."""
    top = _Stack("model.mtp.", (("layer", range(config.num_mtp_layers)),), config.initializer_range)
    at, hidden = top.within("layers.{layer}."), config.hidden_size
    return MTP(
        embed=_embedding(top, "embed_tokens.weight", config.vocab_size, hidden) if own_embed else None,
        enorm=at.norm("enorm.m.weight", hidden),
        hnorm=at.norm("hnorm.m.weight", hidden),
        eh_proj=at.linear("eh_proj.weight", 2 * hidden, hidden, (None, "embed")),
        layer=_dense_layer(config, at, "transformer_layer.mlp."),
        norm=top.norm("norm.weight", hidden),
        head=None,
    )
