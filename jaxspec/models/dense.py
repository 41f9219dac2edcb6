"""The cache-free twin: whole sequences, keys and values spelled out per head, every expert computed.

It is the oracle the paged model is tested against, and the model that is trained.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.models.block_scaled import BlockScaled, dequantize
from jaxspec.models.params import MLP, Attention, Layer, MoE, Params, ShortcutLayer
from jaxspec.models.primitives import (
    apply_head,
    project_latents,
    project_output,
    project_queries,
    rms_norm,
    rope_angles,
    route,
    swiglu,
)


@struct.dataclass
class DenseOutput:
    """Whole-sequence results.

    Attributes:
        logits: predicts token i + 1 at position i.
        hidden: the trunk's states after its final norm.
        mtp_logits: module d predicts token i + d + 2 at position i; only i < t - d - 1 is meaningful.
        expert_load: share of tokens that chose each expert, for the MoE layers and then the MTP modules.
    """

    logits: Float[Array, "b t vocab"]
    hidden: Float[Array, "b t hidden"]
    mtp_logits: Float[Array, "d b t vocab"]
    expert_load: Float[Array, "layers experts"]


def dense_forward(params: Params, config: ModelConfig, tokens: Int[Array, "b t"]) -> DenseOutput:
    """Runs the trunk and every MTP module over whole sequences, causally and without a cache.

    Raises:
        ValueError: at trace time, for a sequence beyond the context in which sparse attention is dense.
    """
    config.check_context("a sequence of", tokens.shape[1])
    params = _without_block_scales(params)
    angles = rope_angles(config, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))

    def step(x: Array, layer: Layer | ShortcutLayer) -> tuple[Array, Array]:
        run = _shortcut_layer if isinstance(layer, ShortcutLayer) else _layer
        return run(layer, config, x, angles)

    x, loads = params.embed[tokens], []
    if params.dense is not None:
        x, _ = jax.lax.scan(step, x, params.dense)
    if params.moe is not None:
        x, load = jax.lax.scan(step, x, params.moe)
        loads.append(load)
    hidden = rms_norm(x, params.norm, config.rms_norm_eps)
    logits = apply_head(params, hidden)
    mtp_logits = jnp.zeros((0, *logits.shape), logits.dtype)
    if params.mtp is not None:
        mtp_logits, load = _mtp_chain(params, config, tokens, hidden, angles)
        if config.mtp_moe:
            loads.append(load)
    expert_load = jnp.concatenate(loads) if loads else jnp.zeros((0, config.n_routed_experts))
    return DenseOutput(logits, hidden, mtp_logits, expert_load)


def _without_block_scales(params: Params) -> Params:
    """Weights kept in FP8 spelled out: this model is the plain one."""

    def spell_out(weight: Array | BlockScaled) -> Array:
        return dequantize(weight, params.embed.dtype) if isinstance(weight, BlockScaled) else weight

    return jax.tree.map(spell_out, params, is_leaf=lambda x: isinstance(x, BlockScaled))


def _layer(
    layer: Layer, config: ModelConfig, x: Float[Array, "b t hidden"], angles: Float[Array, "b t two half"]
) -> tuple[Float[Array, "b t hidden"], Float[Array, "load"]]:
    x, normed = _attend(layer, config, x, angles)
    if isinstance(layer.mlp, MLP):
        return x + swiglu(normed, layer.mlp), jnp.zeros((0,))
    out, load = _moe(layer.mlp, config, normed.reshape(-1, normed.shape[-1]))
    return x + out.reshape(x.shape), load


def _shortcut_layer(
    layer: ShortcutLayer, config: ModelConfig, x: Float[Array, "b t hidden"], angles: Float[Array, "b t two half"]
) -> tuple[Float[Array, "b t hidden"], Float[Array, "load"]]:
    x, normed = _attend(layer.first, config, x, angles)
    routed, load = _moe(layer.moe, config, normed.reshape(-1, normed.shape[-1]))
    x, normed = _attend(layer.second, config, x + swiglu(normed, layer.first.mlp), angles)
    return x + swiglu(normed, layer.second.mlp) + routed.reshape(x.shape), load


def _attend(
    layer: Layer, config: ModelConfig, x: Float[Array, "b t hidden"], angles: Float[Array, "b t two half"]
) -> tuple[Float[Array, "b t hidden"], Float[Array, "b t hidden"]]:
    """The residual stream after attention, and what the MLP reads of it."""
    x = x + _attention(layer.attn, config, rms_norm(x, layer.attn_norm, config.rms_norm_eps), angles)
    return x, rms_norm(x, layer.mlp_norm, config.rms_norm_eps)


def _attention(
    attn: Attention, config: ModelConfig, x: Float[Array, "b t hidden"], angles: Float[Array, "b t two half"]
) -> Float[Array, "b t hidden"]:
    """Plain causal attention over per-head keys and values, not absorbed; softmax in float32."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    q_nope, q_rope = project_queries(attn, config, x, angles, positions)
    latent, k_rope = project_latents(attn, config, x, angles)
    k_nope = jnp.einsum("bsc,hnc->bshn", latent, attn.k_up)
    values = jnp.einsum("bsc,hcv->bshv", latent, attn.v_up)
    scores = jnp.einsum("bthn,bshn->bhts", q_nope, k_nope) + jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    scores = jnp.where(causal[None, None], scores.astype(jnp.float32) * config.softmax_scale, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return project_output(attn, jnp.einsum("bhts,bshv->bthv", weights, values))


def _moe(
    moe: MoE, config: ModelConfig, x: Float[Array, "n hidden"]
) -> tuple[Float[Array, "n hidden"], Float[Array, "experts"]]:
    """Every expert on every token, weighted by the router (zero where not chosen)."""
    weights, chosen = route(moe, config, x)
    one_hot = jax.nn.one_hot(chosen, config.n_routed_experts, dtype=jnp.float32)
    identity = jnp.sum(weights * (chosen >= config.n_routed_experts), axis=-1, keepdims=True)
    dispatch = jnp.einsum("nk,nke->ne", weights, one_hot).astype(x.dtype)
    inner = jax.nn.silu(jnp.einsum("nh,ehf->enf", x, moe.experts.gate)) * jnp.einsum("nh,ehf->enf", x, moe.experts.up)
    out = jnp.einsum("enf,efh->nh", inner * dispatch.T[:, :, None], moe.experts.down)
    out = out + x * identity.astype(x.dtype)
    load = jnp.mean(jnp.sum(one_hot, axis=1), axis=0)
    return (out if moe.shared is None else out + swiglu(x, moe.shared)), load


def _mtp_chain(
    params: Params, config: ModelConfig, tokens: Int[Array, "b t"], hidden: Float[Array, "b t hidden"], angles: Array
) -> tuple[Float[Array, "d b t vocab"], Float[Array, "d experts"]]:
    """Module d joins the state below it at i with token i + d + 1 (DeepSeek-V3 report, section 2.2).

    The embedding comes first in the joined vector, as in the released checkpoints, where the report prints the
    reverse; the state is the normalised one.
    """
    eps = config.rms_norm_eps

    def step(below: Array, inputs: tuple) -> tuple[Array, tuple[Array, Array]]:
        depth, module = inputs
        embed = params.embed if module.embed is None else module.embed
        ahead = jnp.roll(tokens, -(depth + 1), axis=1)
        joined = [rms_norm(embed[ahead], module.enorm, eps), rms_norm(below, module.hnorm, eps)]
        x, load = _layer(module.layer, config, jnp.concatenate(joined, axis=-1) @ module.eh_proj, angles)
        x = rms_norm(x, module.norm, eps)
        return x, (apply_head(params, x, module.head), load)

    _, outputs = jax.lax.scan(step, hidden, (jnp.arange(config.num_mtp_layers), params.mtp))
    return outputs
