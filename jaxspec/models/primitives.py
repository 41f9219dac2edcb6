"""Pieces every model uses: RMSNorm, SwiGLU, the head, rotary embedding, the latent projections of MLA, the router."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig, RopeConfig, YarnConfig
from jaxspec.models.block_scaled import BlockScaled, dequantize, matmul
from jaxspec.models.params import MLP, Attention, MoE, Params
from pallas_kernels.latent_append import norm_rope


def rms_norm(x: Float[Array, "*b d"], weight: Float[Array, "d"], eps: float) -> Float[Array, "*b d"]:
    """Root-mean-square normalisation, in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def swiglu(x: Float[Array, "*b hidden"], mlp: MLP) -> Float[Array, "*b hidden"]:
    """down(silu(gate(x)) * up(x))."""
    return matmul(jax.nn.silu(matmul(x, mlp.gate)) * matmul(x, mlp.up), mlp.down)


def apply_head(
    params: Params, hidden: Float[Array, "*b hidden"], own: Float[Array, "hidden vocab"] | BlockScaled | None = None
) -> Float[Array, "*b vocab"]:
    """Float32 logits by the head given, else the trunk's, else the tied embedding."""
    head = own if own is not None else params.embed.T if params.head is None else params.head
    if isinstance(head, BlockScaled):  # no release has its head in FP8, so this need not be lean
        head = dequantize(head, hidden.dtype)
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


def _affine(x: Array, weight: Array | BlockScaled, bias: Array | None) -> Array:
    y = matmul(x, weight)
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)


def project_queries(
    attn: Attention,
    config: ModelConfig,
    x: Float[Array, "b t hidden"],
    angles: Float[Array, "b t two half"],
    positions: Int[Array, "b t"],
) -> tuple[Float[Array, "b t h n"], Float[Array, "b t h r"]]:
    """Queries per head: the part without position and the rotated part."""
    if attn.q_a is not None:
        x = rms_norm(_affine(x, attn.q_a, attn.q_a_bias), attn.q_a_norm, config.latent_norm_eps)
    q = matmul(x, attn.q_b).reshape(*x.shape[:2], config.num_heads, config.qk_head_dim)
    if config.rope.yarn is not None and config.rope.yarn.llama_4_scaling_beta:
        q = q * _query_scale(config.rope.yarn, positions)[..., None, None].astype(q.dtype)
    nope, rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
    return nope, apply_rope(rope, angles, config.rope.interleave)


def _query_scale(yarn: YarnConfig, positions: Int[Array, "b t"]) -> Float[Array, "b t"]:
    """1 + beta ln(1 + how many original contexts lie before the position) (transformers' Mistral4Attention)."""
    contexts = jnp.floor(positions / yarn.original_max_position_embeddings)
    return 1 + yarn.llama_4_scaling_beta * jnp.log1p(contexts)


def project_kv(attn: Attention, x: Float[Array, "b t hidden"]) -> Float[Array, "b t w"]:
    """A token's latent and its key side by side, neither normalised nor rotated yet."""
    return _affine(x, attn.kv_a, attn.kv_a_bias)


def project_latents(
    attn: Attention, config: ModelConfig, x: Float[Array, "b t hidden"], angles: Float[Array, "b t two half"]
) -> tuple[Float[Array, "b t c"], Float[Array, "b t r"]]:
    """What a token leaves in the cache: its normalised latent and its rotated key, shared by all heads."""
    interleave, multiplier = config.rope.interleave, config.latent_multiplier
    return norm_rope(project_kv(attn, x), attn.kv_a_norm, angles, config.latent_norm_eps, interleave, multiplier)


def project_output(attn: Attention, values: Float[Array, "b t h v"]) -> Float[Array, "b t hidden"]:
    """Joins the heads."""
    return _affine(values.reshape(*values.shape[:2], -1), attn.o, attn.o_bias)


def route(
    moe: MoE, config: ModelConfig, x: Float[Array, "n hidden"]
) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
    """Chooses the experts of each token, in float32.

    A bias, where the router has one, bears on the choice alone; the weights come from the plain scores. Experts
    outside the best groups are -inf, so they lose even against negative scores (DeepSeek-V2 report, section 2.2.2,
    and DeepSeek-V3 report, section 2.1.2; transformers' routers of the families).

    Returns:
        Weight and id of each chosen expert; ids from `n_routed_experts` on are experts that hand on their input.
    """
    # Reduced precision, which accelerators use by default, would change the choice of experts.
    logits = jnp.matmul(x.astype(jnp.float32), moe.router, precision=jax.lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(logits) if config.scoring_func == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = scores if moe.router_bias is None else scores + moe.router_bias[None]
    if config.n_group > 1:
        choice = _keep_best_groups(choice, config)
    _, experts = jax.lax.top_k(choice, config.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * config.routed_scaling_factor, experts


def _keep_best_groups(choice: Float[Array, "n e"], config: ModelConfig) -> Float[Array, "n e"]:
    """A group counts by its two best experts, or by its best, as the method says."""
    grouped = choice.reshape(choice.shape[0], config.n_group, -1)
    counted = 2 if config.topk_method == "noaux_tc" else 1
    group_scores = jnp.sum(jax.lax.top_k(grouped, counted)[0], axis=-1)
    _, best = jax.lax.top_k(group_scores, config.topk_group)
    keep = jnp.any(jax.nn.one_hot(best, config.n_group, dtype=bool), axis=1)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def identity_share(
    config: ModelConfig, weights: Float[Array, "n k"], chosen: Int[Array, "n k"]
) -> tuple[Float[Array, "n"], Float[Array, "n k"], Int[Array, "n k"]]:
    """Splits off the experts that hand on their input.

    Returns:
        Their total weight, by which the input counts; and weights and ids of the others, where these have weight 0
        at expert 0.
    """
    identity = chosen >= config.n_routed_experts
    share = jnp.sum(jnp.where(identity, weights, 0), axis=-1)
    return share, jnp.where(identity, 0, weights), jnp.where(identity, 0, chosen)
