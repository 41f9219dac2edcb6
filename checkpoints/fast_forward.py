"""The loss of `dense_forward`, computed in the form that trains fastest on a CPU.

Same mathematics, other association: matrices that share an input are joined, routed and shared experts run as one
wide SwiGLU, weight products take bfloat16 operands and accumulate in float32, and attention and cross-entropy have
hand-written backward passes that keep less. `dense_forward` is the twin it must agree with.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.models.params import MLP, Attention, Layer, MoE, Params
from jaxspec.models.primitives import apply_rope, rms_norm, rope_angles, route


def losses(
    params: Params, config: ModelConfig, tokens: Int[Array, "b t+2"]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, "layers experts"]]:
    """Mean cross-entropy of the next token and, by the MTP module, of the one after it; and expert load."""
    inputs, following, second = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
    angles = rope_angles(config, jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape))
    x, loads = params.embed[inputs], []
    for stack in (params.dense, params.moe):
        for layer in _unstack(stack):
            x, load = _layer(layer, config, x, angles)
            loads += [] if load is None else [load]
    hidden = rms_norm(x, params.norm, config.rms_norm_eps)
    mtp = jax.tree.map(lambda leaf: leaf[0], params.mtp)
    joined = [
        rms_norm(params.embed[following], mtp.enorm, config.rms_norm_eps),
        rms_norm(hidden, mtp.hnorm, config.rms_norm_eps),
    ]
    x, load = _layer(mtp.layer, config, mixed_matmul(jnp.concatenate(joined, axis=-1), mtp.eh_proj), angles)
    ahead = rms_norm(x, mtp.norm, config.rms_norm_eps)
    main = cross_entropy(mixed_matmul(hidden, params.head), following)
    return main, cross_entropy(mixed_matmul(ahead, params.head), second), jnp.stack([*loads, load])


@jax.custom_vjp
def mixed_matmul(x: Float[Array, "*b k"], weight: Float[Array, "k n"]) -> Float[Array, "*b n"]:
    """x @ weight with bfloat16 operands and float32 accumulation, both ways."""
    return _forward_matmul(x, weight)[0]


def _bf16_matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def _forward_matmul(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    x, weight = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    return _bf16_matmul(x, weight), (x, weight)


def _backward_matmul(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, weight = saved
    dy = dy.astype(jnp.bfloat16)
    dw = _bf16_matmul(_transposed(x.reshape(-1, x.shape[-1])), dy.reshape(-1, dy.shape[-1]))
    return _bf16_matmul(dy, _transposed(weight)), dw


def _transposed(x: Float[Array, "m n"]) -> Float[Array, "n m"]:
    """A row-major transpose: XLA's CPU products take twice as long when it folds the transpose into them."""
    return with_layout_constraint(x.T, Layout((0, 1)))


mixed_matmul.defvjp(_forward_matmul, _backward_matmul)


@jax.custom_vjp
def cross_entropy(logits: Float[Array, "b t vocab"], targets: Int[Array, "b t"]) -> Float[Array, ""]:
    """Mean cross-entropy in nats; the backward pass keeps the logits alone, not their softmax."""
    return _forward_cross_entropy(logits, targets)[0]


def _forward_cross_entropy(logits: Array, targets: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    log_norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    return jnp.mean(log_norm - chosen), (logits, log_norm, targets)


def _backward_cross_entropy(saved: tuple[Array, Array, Array], d: Array) -> tuple[Array, None]:
    logits, log_norm, targets = saved
    hot = jnp.arange(logits.shape[-1]) == targets[..., None]
    return (d / targets.size) * (jnp.exp(logits - log_norm) - hot), None


cross_entropy.defvjp(_forward_cross_entropy, _backward_cross_entropy)


@jax.custom_vjp
def attend(
    q: Float[Array, "b h t k"], k: Float[Array, "b h s k"], v: Float[Array, "b h s v"]
) -> Float[Array, "b h t v"]:
    """Causal attention of scaled queries; the backward pass keeps one score-sized array."""
    return _forward_attend(q, k, v)[0]


def _forward_attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(causal, scores, -jnp.inf)
    powers = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    inverse_sum = 1 / jnp.sum(powers, axis=-1, keepdims=True)
    out = jnp.einsum("bhts,bhsv->bhtv", powers, v) * inverse_sum
    return out, (q, k, v, powers, inverse_sum, out)


def _backward_attend(saved: tuple[Array, ...], dout: Array) -> tuple[Array, Array, Array]:
    q, k, v, powers, inverse_sum, out = saved
    dout = dout * inverse_sum
    dv = jnp.einsum("bhts,bhtv->bhsv", powers, dout)
    dweights = jnp.einsum("bhtv,bhsv->bhts", dout, v)
    dscores = powers * (dweights - jnp.sum(dout * out, axis=-1, keepdims=True))
    return jnp.einsum("bhts,bhsk->bhtk", dscores, k), jnp.einsum("bhts,bhtk->bhsk", dscores, q), dv


attend.defvjp(_forward_attend, _backward_attend)


def _unstack(stack: Layer | None) -> list[Layer]:
    depth = 0 if stack is None else stack.attn_norm.shape[0]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(depth)]


def _layer(
    layer: Layer, config: ModelConfig, x: Float[Array, "b t hidden"], angles: Float[Array, "b t two half"]
) -> tuple[Float[Array, "b t hidden"], Float[Array, "experts"] | None]:
    eps = config.rms_norm_eps
    x = x + _attention(layer.attn, config, rms_norm(x, layer.attn_norm, eps), angles)
    normed, mlp = rms_norm(x, layer.mlp_norm, eps), layer.mlp
    if isinstance(mlp, MLP):
        return x + _gated(normed, mlp.gate, mlp.up, mlp.down, None), None
    out, load = _moe(mlp, config, normed)
    return x + out, load


def _attention(
    attn: Attention, config: ModelConfig, x: Float[Array, "b t hidden"], angles: Float[Array, "b t two half"]
) -> Float[Array, "b t hidden"]:
    (b, t, _), heads, nope = x.shape, config.num_heads, config.qk_nope_head_dim
    q_lora, interleave, eps = attn.q_a.shape[-1], config.rope.interleave, config.latent_norm_eps
    down = mixed_matmul(x, jnp.concatenate([attn.q_a, attn.kv_a], axis=-1))
    compressed, latent, k_rope = jnp.split(down, [q_lora, q_lora + config.kv_lora_rank], axis=-1)
    q = mixed_matmul(rms_norm(compressed, attn.q_a_norm, eps), attn.q_b).reshape(b, t, heads, -1)
    q = jnp.concatenate([q[..., :nope], apply_rope(q[..., nope:], angles, interleave)], axis=-1)
    up = jnp.concatenate([attn.k_up.transpose(2, 0, 1), attn.v_up.transpose(1, 0, 2)], axis=-1)
    kv = mixed_matmul(rms_norm(latent, attn.kv_a_norm, eps), up.reshape(up.shape[0], -1)).reshape(b, t, heads, -1)
    k_rope = jnp.broadcast_to(apply_rope(k_rope, angles, interleave)[:, :, None], (b, t, heads, k_rope.shape[-1]))
    k = jnp.concatenate([kv[..., :nope], k_rope], axis=-1)
    q, k, v = (a.transpose(0, 2, 1, 3) for a in (q * config.softmax_scale, k, kv[..., nope:]))
    return mixed_matmul(attend(q, k, v).transpose(0, 2, 1, 3).reshape(b, t, -1), attn.o)


def _moe(
    moe: MoE, config: ModelConfig, x: Float[Array, "b t hidden"]
) -> tuple[Float[Array, "b t hidden"], Float[Array, "experts"]]:
    """Routed and shared experts as one SwiGLU whose inner columns the router weights."""
    weights, chosen = route(moe, config, x.reshape(-1, x.shape[-1]))
    one_hot = jax.nn.one_hot(chosen, config.n_routed_experts, dtype=jnp.float32)
    dispatch = jnp.einsum("nk,nke->ne", weights, one_hot)
    # By a product with zeros and ones, several times faster than repeating and concatenating.
    experts, shared = config.n_routed_experts, moe.shared.gate.shape[-1]
    owner = np.repeat(np.arange(experts + 1), [config.moe_intermediate_size] * experts + [shared])
    columns = jnp.pad(dispatch, ((0, 0), (0, 1)), constant_values=1.0) @ jax.nn.one_hot(owner, experts + 1).T

    def join(routed: Float[Array, "e hidden f"], common: Float[Array, "hidden s"]) -> Float[Array, "hidden e*f+s"]:
        return jnp.concatenate([routed.transpose(1, 0, 2).reshape(x.shape[-1], -1), common], axis=1)

    gate, up = join(moe.experts.gate, moe.shared.gate), join(moe.experts.up, moe.shared.up)
    down = jnp.concatenate([moe.experts.down.reshape(-1, x.shape[-1]), moe.shared.down])
    load = jnp.mean(jnp.sum(one_hot, axis=1), axis=0)
    return _gated(x, gate, up, down, columns.reshape(*x.shape[:2], -1)), load


def _gated(x: Array, gate: Array, up: Array, down: Array, columns: Array | None) -> Array:
    inner = jax.checkpoint(_swiglu)(mixed_matmul(x, gate), mixed_matmul(x, up), columns)
    return mixed_matmul(inner, down)


def _swiglu(gate: Array, up: Array, columns: Array | None) -> Array:
    inner = jax.nn.silu(gate) * up
    return inner if columns is None else inner * columns
