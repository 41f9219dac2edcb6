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

    q_a: Float[Array, "*l hidden q_lora"] | None
    q_a_bias: Float[Array, "*l q_lora"] | None
    q_a_norm: Float[Array, "*l q_lora"] | None
    q_b: Float[Array, "*l q_in queries"]
    kv_a: Float[Array, "*l hidden c_rope"]
    kv_a_bias: Float[Array, "*l c_rope"] | None
    kv_a_norm: Float[Array, "*l c"]
    k_up: Float[Array, "*l h n c"]
    v_up: Float[Array, "*l h c v"]
    o: Float[Array, "*l values hidden"]
    o_bias: Float[Array, "*l hidden"] | None


@struct.dataclass
class MLP:
    """SwiGLU feed-forward block."""

    gate: Float[Array, "*l hidden ffn"]
    up: Float[Array, "*l hidden ffn"]
    down: Float[Array, "*l ffn hidden"]


@struct.dataclass
class MoE:
    """Routed experts (an MLP with an expert axis), their router, and the shared expert.

    `experts` is None in the one layer that a scan is at, where the whole stack's are passed beside it.
    """

    router: Float[Array, "*l hidden experts"]
    router_bias: Float[Array, "*l experts"]
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
class MTP:
    """A stack of multi-token-prediction modules. `embed` and `head` are None where the trunk's serve."""

    embed: Float[Array, "*d vocab hidden"] | None
    enorm: Float[Array, "*d hidden"]
    hnorm: Float[Array, "*d hidden"]
    eh_proj: Float[Array, "*d joined hidden"]
    layer: Layer
    norm: Float[Array, "*d hidden"]
    head: Float[Array, "*d hidden vocab"] | None


@struct.dataclass
class Params:
    """All parameters. `dense` and `moe` are the trunk's two stacks, `head` is None when tied to `embed`."""

    embed: Float[Array, "vocab hidden"]
    dense: Layer | None
    moe: Layer | None
    norm: Float[Array, "hidden"]
    head: Float[Array, "hidden vocab"] | None
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
        dense=_layer(config, range(dense), moe=False) if dense else None,
        moe=_layer(config, range(dense, depth), moe=True) if depth > dense else None,
        norm=top.norm("model.norm.weight", h),
        head=None if config.tie_word_embeddings else top.linear("lm_head.weight", h, v, ("embed", "vocab")),
        mtp=_mtp(config, own_mtp_embed, own_mtp_head) if config.num_mtp_layers else None,
    )


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


def _layer(config: ModelConfig, layers: range, moe: bool) -> Layer:
    at = _Stack("model.layers.{layer}.", (("layer", layers),), config.initializer_range)
    return Layer(
        attn_norm=at.norm("input_layernorm.weight", config.hidden_size),
        attn=_attention(config, dataclasses.replace(at, prefix=at.prefix + "self_attn.")),
        mlp_norm=at.norm("post_attention_layernorm.weight", config.hidden_size),
        mlp=_moe(config, at) if moe else _mlp(at, "mlp.", config.hidden_size, config.intermediate_size),
    )


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


def _mlp(at: _Stack, prefix: str, hidden: int, ffn: int) -> MLP:
    at = dataclasses.replace(at, prefix=at.prefix + prefix)
    return MLP(
        gate=at.linear("gate_proj.weight", hidden, ffn, ("embed", "mlp")),
        up=at.linear("up_proj.weight", hidden, ffn, ("embed", "mlp")),
        down=at.linear("down_proj.weight", ffn, hidden, ("mlp", "embed")),
    )


def _moe(config: ModelConfig, at: _Stack) -> MoE:
    hidden, experts, ffn = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    per_expert = dataclasses.replace(at, stack=(*at.stack, ("expert", range(experts))))
    shared = config.n_shared_experts
    return MoE(
        router=at.linear("mlp.gate.weight", hidden, experts, ("embed", None), dtype=jnp.float32),
        router_bias=at.bias("mlp.gate.e_score_correction_bias", experts, None, dtype=jnp.float32),
        experts=_mlp(per_expert, "mlp.experts.{expert}.", hidden, ffn),
        shared=_mlp(at, "mlp.shared_experts.", hidden, shared * ffn) if shared else None,
    )


def _mtp(config: ModelConfig, own_embed: bool, own_head: bool) -> MTP:
    hidden, vocab = config.hidden_size, config.vocab_size
    layers = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    at = _Stack("model.layers.{layer}.", (("layer", layers),), config.initializer_range)
    return MTP(
        embed=_embedding(at, "embed_tokens.weight", vocab, hidden) if own_embed else None,
        enorm=at.norm("enorm.weight", hidden),
        hnorm=at.norm("hnorm.weight", hidden),
        eh_proj=at.linear("eh_proj.weight", 2 * hidden, hidden, (None, "embed")),
        layer=_layer(config, layers, moe=True),
        norm=at.norm("shared_head.norm.weight", hidden),
        head=at.linear("shared_head.head.weight", hidden, vocab, ("embed", "vocab")) if own_head else None,
    )
