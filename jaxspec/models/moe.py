"""Routed experts over a few tokens: only the experts in use are read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.models.block_scaled import matmul, ragged
from jaxspec.models.params import MLP, MoE
from jaxspec.models.primitives import identity_share, route, swiglu


def apply_moe(
    moe: MoE, experts: MLP, layer: Int[Array, ""], config: ModelConfig, x: Float[Array, "b t hidden"]
) -> Float[Array, "b t hidden"]:
    """Shared expert plus the routed ones.

    Args:
        moe: router and shared expert of this layer.
        experts: expert weights of *all* layers of the stack, so that no layer's are sliced out (and copied).
        layer: which of them to use.
        config: the architecture.
        x: normalised states.
    """
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = route(moe, config, tokens)
    if config.zero_expert_num:
        share, weights, chosen = identity_share(config, weights, chosen)
    out = lax.platform_dependent(
        experts, layer, tokens, weights, chosen, cpu=loop_over_used_experts, default=grouped_experts
    )
    if config.zero_expert_num:
        out = out + tokens * share[:, None].astype(tokens.dtype)
    if moe.shared is not None:
        out = out + swiglu(tokens, moe.shared)
    return out.reshape(x.shape)


def loop_over_used_experts(
    experts: MLP,
    layer: Int[Array, ""],
    x: Float[Array, "n hidden"],
    weights: Float[Array, "n k"],
    chosen: Int[Array, "n k"],
) -> Float[Array, "n hidden"]:
    """One trip for every expert that some token chose, over all tokens, weighted by zero where not chosen.

    On XLA's CPU backend, at 1 to 64 tokens, computing all experts and `ragged_dot` take 1.5 to 80 times as long, and
    gathering the chosen ones' weights about as long at one token of a small model and 2 to 8 times as long elsewhere
    (benchmarks/moe.py): no count of tokens is worth another way.
    """
    num_experts = experts.gate.shape[1]
    share = jnp.sum(jax.nn.one_hot(chosen, num_experts, dtype=x.dtype) * weights[..., None].astype(x.dtype), axis=1)
    used = jnp.zeros(num_experts, bool).at[chosen.reshape(-1)].set(True)
    order = jnp.argsort(~used)

    def visit(i: Array, out: Array) -> Array:
        expert = order[i]
        gate, up, down = (w[layer, expert] for w in (experts.gate, experts.up, experts.down))
        inner = jax.nn.silu(matmul(x, gate)) * matmul(x, up)
        return out + matmul(inner * lax.dynamic_slice_in_dim(share, expert, 1, axis=1), down)

    return lax.fori_loop(0, jnp.sum(used), visit, jnp.zeros_like(x))


def grouped_experts(
    experts: MLP,
    layer: Int[Array, ""],
    x: Float[Array, "n hidden"],
    weights: Float[Array, "n k"],
    chosen: Int[Array, "n k"],
) -> Float[Array, "n hidden"]:
    """Tokens sorted by expert, then one grouped matrix product for each weight."""
    k = chosen.shape[1]
    order = jnp.argsort(chosen.reshape(-1))
    numbers = jnp.arange(experts.gate.shape[1])
    sizes = jnp.sum(chosen.reshape(-1, 1) == numbers[None], axis=0, dtype=jnp.int32)  # bincount, in one GPU kernel
    gate, up, down = (w[layer] for w in (experts.gate, experts.up, experts.down))
    rows = x[order // k]
    inner = jax.nn.silu(ragged(rows, gate, sizes)) * ragged(rows, up, sizes)
    out = ragged(inner, down, sizes) * weights.reshape(-1)[order][:, None].astype(x.dtype)
    return jnp.zeros_like(x).at[order // k].add(out)
