"""Pieces every model uses: RMSNorm, SwiGLU, the head, rotary embedding, the latent projections of MLA, the router."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig, RopeConfig, YarnConfig
from jaxspec.models.params import MLP, Attention, MoE, Params


def rms_norm(x: Float[Array, "*b d"], weight: Float[Array, "d"], eps: float) -> Float[Array, "*b d"]:
    """Root-mean-square normalisation, in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def swiglu(x: Float[Array, "*b hidden"], mlp: MLP) -> Float[Array, "*b hidden"]:
    """down(silu(gate(x)) * up(x))."""
    return (jax.nn.silu(x @ mlp.gate) * (x @ mlp.up)) @ mlp.down


def apply_head(
    params: Params, hidden: Float[Array, "*b hidden"], own: Float[Array, "hidden vocab"] | None = None
) -> Float[Array, "*b vocab"]:
    """Float32 logits by the head given, else the trunk's, else the tied embedding."""
    head = own if own is not None else params.embed.T if params.head is None else params.head
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)


def rope_frequencies(rope: RopeConfig, dim: int) -> tuple[Float[Array, "half"], float]:
    """Inverse frequencies of `dim` rotary elements and the factor on cos and sin.

    YaRN blends the extended and the original frequencies by a linear ramp between the dimensions that
    turn `beta_fast` and `beta_slow` times over the original context (arXiv:2309.00071, section 3.2).
    """
    plain = 1.0 / rope.theta ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    yarn = rope.yarn
    if yarn is None:
        return plain, 1.0
    low, high = (_turning_dimension(turns, rope.theta, dim, yarn) for turns in (yarn.beta_fast, yarn.beta_slow))
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = jnp.clip((jnp.arange(dim // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp), _cos_sin_factor(yarn)


def _turning_dimension(turns: float, theta: float, dim: int, yarn: YarnConfig) -> float:
    """The (fractional) rotary pair that makes `turns` turns over the original context."""
    wavelengths = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
    return dim * math.log(wavelengths) / (2 * math.log(theta))


def _cos_sin_factor(yarn: YarnConfig) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn.magnitude(yarn.mscale) / yarn.magnitude(yarn.mscale_all_dim)
    return yarn.magnitude(1.0)


def rope_angles(config: ModelConfig, positions: Int[Array, "b t"]) -> Float[Array, "b t two half"]:
    """cos and sin of every position, stacked on the third axis, in float32."""
    frequencies, factor = rope_frequencies(config.rope, config.qk_rope_head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-2) * factor


def apply_rope(
    x: Float[Array, "b t *h r"], angles: Float[Array, "b t two half"], interleave: bool
) -> Float[Array, "b t *h r"]:
    """Rotates the pairs of x. Pairs are adjacent when `interleave`, else half a width apart.

    The result is always half-split (all first elements of the pairs, then all second ones): only dot products
    of rotated vectors are ever used, and they do not depend on the order.
    """
    shape = (*x.shape[:2], *(1,) * (x.ndim - 3), angles.shape[-1])
    cos, sin = (angles[:, :, i].reshape(shape) for i in (0, 1))
    if interleave:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _affine(x: Array, weight: Array, bias: Array | None) -> Array:
    y = x @ weight
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)


def project_queries(
    attn: Attention, config: ModelConfig, x: Float[Array, "b t hidden"], angles: Float[Array, "b t two half"]
) -> tuple[Float[Array, "b t h n"], Float[Array, "b t h r"]]:
    """Queries per head: the part without position and the rotated part."""
    if attn.q_a is not None:
        x = rms_norm(_affine(x, attn.q_a, attn.q_a_bias), attn.q_a_norm, config.latent_norm_eps)
    q = (x @ attn.q_b).reshape(*x.shape[:2], config.num_heads, config.qk_head_dim)
    nope, rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
    return nope, apply_rope(rope, angles, config.rope.interleave)


def project_latents(
    attn: Attention, config: ModelConfig, x: Float[Array, "b t hidden"], angles: Float[Array, "b t two half"]
) -> tuple[Float[Array, "b t c"], Float[Array, "b t r"]]:
    """What a token leaves in the cache: its normalised latent and its rotated key, shared by all heads."""
    latent, rope = jnp.split(_affine(x, attn.kv_a, attn.kv_a_bias), [config.kv_lora_rank], axis=-1)
    latent = rms_norm(latent, attn.kv_a_norm, config.latent_norm_eps)
    return latent, apply_rope(rope, angles, config.rope.interleave)


def project_output(attn: Attention, values: Float[Array, "b t h v"]) -> Float[Array, "b t hidden"]:
    """Joins the heads."""
    return _affine(values.reshape(*values.shape[:2], -1), attn.o, attn.o_bias)


def route(
    moe: MoE, config: ModelConfig, x: Float[Array, "n hidden"]
) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
    """Sigmoid routing with a bias on the choice alone, limited to the best groups, in float32.

    A group's score is the sum of its two best biased scores; experts outside the chosen groups are -inf, so they
    lose even against negative scores. Weights come from the unbiased scores (DeepSeek-V3 report, section 2.1.2;
    transformers' DeepseekV3TopkRouter).

    Returns:
        Weight and id of each chosen expert.
    """
    # Reduced precision, which accelerators use by default, would change the choice of experts.
    scores = jax.nn.sigmoid(jnp.matmul(x.astype(jnp.float32), moe.router, precision=jax.lax.Precision.HIGHEST))
    choice = scores + moe.router_bias[None]
    if config.n_group > 1:
        choice = _keep_best_groups(choice, config.n_group, config.topk_group)
    _, experts = jax.lax.top_k(choice, config.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * config.routed_scaling_factor, experts


def _keep_best_groups(choice: Float[Array, "n e"], groups: int, kept: int) -> Float[Array, "n e"]:
    grouped = choice.reshape(choice.shape[0], groups, -1)
    group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, best = jax.lax.top_k(group_scores, kept)
    keep = jnp.any(jax.nn.one_hot(best, groups, dtype=bool), axis=1)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
