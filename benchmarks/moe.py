"""Four ways to compute a layer's chosen experts, by number of tokens: why the CPU loops over the experts in use.

    uv run python benchmarks/moe.py

Ratios are to the loop, of medians in one run; below 1 would be faster. The shapes are those of the bundled model, and
a wider one with 64 experts of which 6 are chosen.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxspec.models.moe import grouped_experts, loop_over_used_experts
from jaxspec.models.params import MLP

LAYERS, REPEATS = 4, 7
SHAPES = {
    "256 wide, 8 experts of 64, top 2": (256, 8, 64, 2),
    "512 wide, 64 experts of 256, top 6": (512, 64, 256, 6),
}


def all_experts(experts: MLP, layer: Array, x: Array, weights: Array, chosen: Array) -> Array:
    """Every expert on every token."""
    gate, up, down = (w[layer] for w in (experts.gate, experts.up, experts.down))
    share = jnp.sum(jax.nn.one_hot(chosen, gate.shape[0]) * weights[..., None], axis=1)
    inner = jax.nn.silu(jnp.einsum("nh,ehf->enf", x, gate)) * jnp.einsum("nh,ehf->enf", x, up)
    return jnp.einsum("enf,efh->nh", inner * share.T[:, :, None], down)


def gathered_experts(experts: MLP, layer: Array, x: Array, weights: Array, chosen: Array) -> Array:
    """Each token with copies of the weights it chose."""
    gate, up, down = (w[layer, chosen] for w in (experts.gate, experts.up, experts.down))
    inner = jax.nn.silu(jnp.einsum("nh,nkhf->nkf", x, gate)) * jnp.einsum("nh,nkhf->nkf", x, up)
    return jnp.einsum("nkf,nkfh->nh", inner * weights[..., None], down)


WAYS = {
    "loop": loop_over_used_experts,
    "gather": gathered_experts,
    "ragged_dot": grouped_experts,
    "all": all_experts,
}


@functools.partial(jax.jit, static_argnums=0)
def through_layers(way: Callable, experts: MLP, x: Array, weights: Array, chosen: Array) -> Array:
    """The experts of all layers one after another, as in a model."""
    return lax.scan(lambda x, layer: (x + way(experts, layer, x, weights, chosen), None), x, jnp.arange(LAYERS))[0]


def seconds(way: Callable, *arrays: Array) -> float:
    """Median time of a layer."""
    jax.block_until_ready(through_layers(way, *arrays))
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(through_layers(way, *arrays))
        times.append(time.perf_counter() - started)
    return statistics.median(times) / LAYERS


def main() -> None:
    """Prints a table for each shape."""
    for name, (hidden, count, ffn, k) in SHAPES.items():
        keys = jax.random.split(jax.random.key(0), 6)
        inward, outward = (LAYERS, count, hidden, ffn), (LAYERS, count, ffn, hidden)
        experts = MLP(
            *(0.02 * jax.random.normal(key, s) for key, s in zip(keys, (inward, inward, outward), strict=False))
        )
        print(f"{name}\n\n| tokens | loop, microseconds | " + " | ".join(list(WAYS)[1:]) + " |\n|" + "---|" * 5)
        for tokens in (1, 2, 4, 8, 16, 64):
            x = jax.random.normal(keys[3], (tokens, hidden))
            weights = jax.random.uniform(keys[4], (tokens, k))
            chosen = jax.vmap(lambda key, n=count, k=k: jax.random.permutation(key, n)[:k])(
                jax.random.split(keys[5], tokens)
            )
            times = [seconds(way, experts, x, weights, chosen) for way in WAYS.values()]
            print(
                f"| {tokens} | {times[0] * 1e6:.0f} | " + " | ".join(f"{t / times[0]:.1f}" for t in times[1:]) + " |"
            )
        print()


if __name__ == "__main__":
    main()
