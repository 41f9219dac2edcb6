"""The paged model: trunk and MTP modules over the KV pools, a few tokens per row at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxspec.cache.kv_cache import KVCache
from jaxspec.config import ModelConfig
from jaxspec.models.block_scaled import matmul
from jaxspec.models.moe import apply_moe
from jaxspec.models.params import MLP, Attention, Layer, Params, ShortcutLayer, experts_of, without_experts
from jaxspec.models.primitives import (
    project_kv,
    project_output,
    project_queries,
    rms_norm,
    rope_angles,
    swiglu,
)
from pallas_kernels.latent_append import norm_rope_append
from pallas_kernels.paged_mla import Splits, paged_mla, plan_splits


@struct.dataclass
class Placement:
    """Where the tokens of a step stand. Token j of row b is at position `start[b] + j`.

    Attributes:
        page_ids: pages of each row, by position.
        start: position of each row's first token; all before it is in the cache.
        length: how many tokens of each row count. The others are computed, and change nothing.
        window: slots of the positions from `start` on, as many as the whole round may write.
        first: where the layer's cache begins; positions before it hold nothing.
        splits: who attends to what in the GPU kernel; None until `planned`.
    """

    page_ids: Int[Array, "b m"]
    start: Int[Array, "b"]
    length: Int[Array, "b"]
    window: Int[Array, "b w"]
    first: int = struct.field(pytree_node=False, default=0)
    splits: Splits | None = None

    def planned(self, num_tokens: int, num_heads: int, cache: KVCache) -> Placement:
        """With what all layers share: a window of the slots that they write, and the split table of attention.

        Where no kernel reads the table, it is never made.
        """
        pool = cache.latent
        rows, cached = num_tokens * num_heads, (pool.shape[2], str(pool.dtype))
        splits = plan_splits(self.start, self.length, rows, *cached, self.first)
        return self.replace(window=self.slots(num_tokens), splits=splits)

    def slots(self, num_tokens: int) -> Int[Array, "b t"]:
        """Where each token's latents go: its slot of the window, or the scratch page if it does not count.

        Raises:
            ValueError: at trace time, when the step is wider than the window.
        """
        if num_tokens > self.window.shape[1]:
            raise ValueError(
                f"a step of {num_tokens} tokens writes beyond its window of {self.window.shape[1]} slots"
            )
        counts = jnp.arange(num_tokens)[None] < self.length[:, None]
        return jnp.where(counts, self.window[:, :num_tokens], 0)

    def positions(self, num_tokens: int) -> Int[Array, "b t"]:
        """Positions of the tokens."""
        return self.start[:, None] + jnp.arange(num_tokens)[None]


def forward(
    params: Params, config: ModelConfig, tokens: Int[Array, "b t"], cache: KVCache, placement: Placement
) -> tuple[Float[Array, "b t hidden"], KVCache]:
    """Runs the trunk over tokens whose predecessors are cached, and caches them.

    Activations have the dtype `cache` gives. Weights may be stored narrower: they widen, exactly, where used.

    Args:
        params: the parameters.
        config: the architecture.
        tokens: ids.
        cache: the pools.
        placement: positions and slots of the tokens.

    Returns:
        States after the final norm (`apply_head` gives logits), and the pools.
    """
    x = params.embed[tokens].astype(cache.activations)
    placement = placement.planned(tokens.shape[1], config.num_heads, cache)
    angles = rope_angles(config, placement.positions(tokens.shape[1]))
    if params.dense is not None:
        x, cache = _run_stack(params.dense, 0, config, x, angles, cache, placement)
    if params.moe is not None:
        x, cache = _run_stack(params.moe, config.first_k_dense_replace, config, x, angles, cache, placement)
    return rms_norm(x, params.norm, config.rms_norm_eps), cache


def mtp_forward(
    params: Params,
    config: ModelConfig,
    module: int,
    tokens: Int[Array, "b t"],
    below: Float[Array, "b t hidden"],
    cache: KVCache,
    placement: Placement,
) -> tuple[Float[Array, "b t hidden"], KVCache]:
    """Runs one MTP module over pairs (state, the token that follows it).

    Args:
        params: the parameters.
        config: the architecture.
        module: which module.
        tokens: the token after each position.
        below: for module 0 the trunk's state at each position (after its final norm), for later ones the state of
            the module below at the position before.
        cache: the pools; the module owns layer `num_trunk_attentions + module` of them.
        placement: positions and slots of the pairs.

    Returns:
        States after the module's norm (`apply_head` with the module's own head, if any), and the pools.
    """
    mtp = params.mtp
    embed = params.embed if mtp.embed is None else mtp.embed[module]
    parts = jax.tree.map(lambda w: w[module], mtp.replace(embed=None, head=None, layer=without_experts(mtp.layer)))
    eps = config.rms_norm_eps
    following = embed[tokens].astype(below.dtype)
    joined = jnp.concatenate([rms_norm(following, parts.enorm, eps), rms_norm(below, parts.hnorm, eps)], axis=-1)
    # Module d pairs position i with token i + d + 1; it keeps that pair at i + d, where the token is the next one
    # as in every other layer, so its cache begins at position d.
    placement = placement.replace(first=module).planned(tokens.shape[1], config.num_heads, cache)
    index = (jnp.int32(module), jnp.int32(config.num_trunk_attentions + module))
    angles = rope_angles(config, placement.positions(tokens.shape[1]))
    x = matmul(joined, parts.eh_proj)
    x, cache = _layer(parts.layer, experts_of(mtp.layer), index, config, x, angles, cache, placement)
    return rms_norm(x, parts.norm, eps), cache


def _run_stack(
    stack: Layer | ShortcutLayer,
    first: int,
    config: ModelConfig,
    x: Array,
    angles: Array,
    cache: KVCache,
    placement: Placement,
) -> tuple[Array, KVCache]:
    """Scans the layers of a stack; the pools are carried, so they are updated in place.

    The stack's layers are those from `first` on; one of two attention blocks takes two layers of the pools.
    """
    experts, scanned = experts_of(stack), without_experts(stack)
    run, blocks = (_shortcut_layer, 2) if isinstance(stack, ShortcutLayer) else (_layer, 1)

    def step(carry: tuple, inputs: tuple) -> tuple:
        x, cache = carry
        layer, in_stack = inputs
        index = (in_stack, blocks * (first + in_stack))
        return run(layer, experts, index, config, x, angles, cache, placement), None

    layers = jnp.arange(jax.tree.leaves(scanned)[0].shape[0])
    carry, _ = jax.lax.scan(step, (x, cache), (scanned, layers))
    return carry


def _layer(
    layer: Layer,
    experts: MLP | None,
    index: tuple[Int[Array, ""], Int[Array, ""]],
    config: ModelConfig,
    x: Float[Array, "b t hidden"],
    angles: Float[Array, "b t two half"],
    cache: KVCache,
    placement: Placement,
) -> tuple[Float[Array, "b t hidden"], KVCache]:
    """One decoder layer. `index` is its place in the stack (for the experts) and in the pools."""
    in_stack, in_pool = index
    x, normed, cache = _attend(layer, in_pool, config, x, angles, cache, placement)
    if isinstance(layer.mlp, MLP):
        return x + swiglu(normed, layer.mlp), cache
    return x + apply_moe(layer.mlp, experts, in_stack, config, normed), cache


def _shortcut_layer(
    layer: ShortcutLayer,
    experts: MLP,
    index: tuple[Int[Array, ""], Int[Array, ""]],
    config: ModelConfig,
    x: Float[Array, "b t hidden"],
    angles: Float[Array, "b t two half"],
    cache: KVCache,
    placement: Placement,
) -> tuple[Float[Array, "b t hidden"], KVCache]:
    """LongCat's layer: the experts' output skips the second block (arXiv:2509.01322, section 2.1.2)."""
    in_stack, in_pool = index
    x, normed, cache = _attend(layer.first, in_pool, config, x, angles, cache, placement)
    routed = apply_moe(layer.moe, experts, in_stack, config, normed)
    x = x + swiglu(normed, layer.first.mlp)
    x, normed, cache = _attend(layer.second, in_pool + 1, config, x, angles, cache, placement)
    return x + swiglu(normed, layer.second.mlp) + routed, cache


def _attend(
    layer: Layer,
    in_pool: Int[Array, ""],
    config: ModelConfig,
    x: Float[Array, "b t hidden"],
    angles: Float[Array, "b t two half"],
    cache: KVCache,
    placement: Placement,
) -> tuple[Float[Array, "b t hidden"], Float[Array, "b t hidden"], KVCache]:
    """The residual stream after attention, and what the MLP reads of it."""
    normed = rms_norm(x, layer.attn_norm, config.rms_norm_eps)
    attended, cache = _attention(layer.attn, in_pool, config, normed, angles, cache, placement)
    x = x + attended
    return x, rms_norm(x, layer.mlp_norm, config.rms_norm_eps), cache


def _attention(
    attn: Attention,
    layer: Int[Array, ""],
    config: ModelConfig,
    x: Float[Array, "b t hidden"],
    angles: Float[Array, "b t two half"],
    cache: KVCache,
    placement: Placement,
) -> tuple[Float[Array, "b t hidden"], KVCache]:
    """Absorbed MLA: queries move into the latent space, so attention reads latents and never expands keys."""
    q_nope, q_rope = project_queries(attn, config, x, angles, placement.positions(x.shape[1]))
    pools = norm_rope_append(
        cache.latent,
        cache.rope,
        layer,
        placement.window,
        project_kv(attn, x),
        attn.kv_a_norm,
        angles,
        config.latent_norm_eps,
        interleave=config.rope.interleave,
        multiplier=config.latent_multiplier,
        scale_pool=cache.scale,
        backend=cache.backend,
    )
    cache = cache.replace(**dict(zip(("latent", "rope", "scale"), pools, strict=False)))
    q_latent = jnp.einsum("bthn,hnc->bthc", q_nope, attn.k_up)
    where = (layer, placement.page_ids, placement.start, placement.length)
    scale, first = config.softmax_scale, placement.first
    arrays = (q_latent, q_rope, cache.latent, cache.rope, *where, scale, first)
    attended = paged_mla(*arrays, scale_pool=cache.scale, splits=placement.splits, backend=cache.backend)
    values = jnp.einsum("bthc,hcv->bthv", attended, attn.v_up)
    return project_output(attn, values), cache
