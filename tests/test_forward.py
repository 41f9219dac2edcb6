"""The paged model against transformers and its own cache-free twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import YARN, write_rnd
from harness import GREEDY, new_state, spec_of
from oracles import reference_logits

from jaxspec import KVCache, Placement, apply_head, dense_forward, forward, load
from jaxspec.decoding import decode_round, prefill
from jaxspec.models import moe, transformer
from jaxspec.models.params import MLP

VARIANTS = {
    "plain": {},
    "yarn": {"rope_scaling": YARN},
    "groups": {"n_group": 4, "topk_group": 2},
    "q_lora_null": {"q_lora_rank": None},
    "all dense": {"first_k_dense_replace": 3},
    "all moe": {"first_k_dense_replace": 0},
}
TOKENS = np.random.default_rng(0).integers(0, 128, (2, 23)).astype(np.int32)
FORWARD = jax.jit(forward, static_argnames="config")


def paged_logits(config, params, steps):
    """Logits of TOKENS, cached in steps of these widths, over pages in no order."""
    page_ids = jnp.asarray(np.random.default_rng(1).permutation(np.arange(1, 17)).reshape(2, 8), jnp.int32)
    cache, logits, start = KVCache.create(config, 17, 4, jnp.float32), [], 0
    for width in steps:
        positions = start + np.arange(width)
        window = page_ids[:, positions // 4] * 4 + (positions % 4)[None]
        both = jnp.full(2, start, jnp.int32), jnp.full(2, width, jnp.int32)
        tokens = jnp.asarray(TOKENS[:, start : start + width])
        hidden, cache = FORWARD(params, config, tokens, cache, Placement(page_ids, *both, window))
        logits.append(apply_head(params, hidden))
        start += width
    return np.concatenate(logits, axis=1)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(tmp_path, name):
    folder = write_rnd(tmp_path / "rnd", **VARIANTS[name])
    expected, _ = reference_logits(folder, TOKENS)
    config, params = load(folder)
    np.testing.assert_allclose(paged_logits(config, params, [23]), expected, atol=1e-4)
    np.testing.assert_allclose(paged_logits(config, params, [7, 1, 4, 4, 4, 3]), expected, atol=1e-4)


def test_more_than_one_block_of_context(tmp_path):
    """160 tokens: the attention loop takes several trips."""
    config, params = load(write_rnd(tmp_path / "rnd"))
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 128, (1, 160)), jnp.int32)
    page_ids = jnp.arange(1, 42)[None]
    window = page_ids[:, jnp.arange(160) // 4] * 4 + (jnp.arange(160) % 4)[None]
    placement = Placement(page_ids, jnp.zeros(1, jnp.int32), jnp.full(1, 160, jnp.int32), window)
    hidden, _ = FORWARD(params, config, tokens, KVCache.create(config, 42, 4, jnp.float32), placement)
    np.testing.assert_allclose(hidden, dense_forward(params, config, tokens).hidden, atol=2e-5)


def test_a_step_wider_than_its_window_is_refused(tmp_path):
    config, params = load(write_rnd(tmp_path / "rnd"))
    one = jnp.ones(2, jnp.int32)
    placement = Placement(jnp.ones((2, 2), jnp.int32), one, one, jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(ValueError, match="a step of 4 tokens writes beyond its window of 3 slots"):
        forward(params, config, jnp.zeros((2, 4), jnp.int32), KVCache.create(config, 4, 4, jnp.float32), placement)


def test_padding_changes_nothing(tmp_path):
    """Field case f3: the same 5 tokens in steps of 8 and 64; padding takes part in nothing."""
    config, params = load(write_rnd(tmp_path / "rnd"))
    found = []
    for width in (8, 64):
        tokens = jnp.zeros((1, width), jnp.int32).at[0, :5].set(jnp.arange(5) + 3)
        page_ids = jnp.arange(1, 17)[None]
        window = page_ids[:, jnp.arange(width) // 4] * 4 + (jnp.arange(width) % 4)[None]
        placement = Placement(page_ids, jnp.zeros(1, jnp.int32), jnp.full(1, 5, jnp.int32), window)
        hidden, _ = FORWARD(params, config, tokens, KVCache.create(config, 17, 4, jnp.float32), placement)
        found.append(hidden[0, :5])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
def test_the_ways_to_compute_experts_agree(num_tokens):
    rng = np.random.default_rng(num_tokens)
    layers, experts, hidden, ffn, k = 2, 8, 16, 12, 2

    def weight(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    stack = MLP(
        weight(layers, experts, hidden, ffn),
        weight(layers, experts, hidden, ffn),
        weight(layers, experts, ffn, hidden),
    )
    x, weights = weight(num_tokens, hidden), weight(num_tokens, k)
    chosen = jnp.asarray([rng.permutation(experts)[:k] for _ in range(num_tokens)], jnp.int32)
    expected = np.zeros((num_tokens, hidden))
    for n in range(num_tokens):
        for share, e in zip(np.asarray(weights[n], np.float64), chosen[n].tolist(), strict=True):
            gate, up, down = (np.asarray(w[1, e], np.float64) for w in (stack.gate, stack.up, stack.down))
            a = np.asarray(x[n], np.float64) @ gate
            expected[n] += share * ((a / (1 + np.exp(-a)) * (np.asarray(x[n], np.float64) @ up)) @ down)
    for way in (moe.loop_over_used_experts, moe.grouped_experts):
        got = jax.jit(way)(stack, jnp.int32(1), x, weights, chosen)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_the_program_does_not_grow_with_depth(tmp_path):
    """Layers are scanned: a round of a model with 12 layers has as many operations as one with 4."""
    sizes = []
    for depth in (4, 12):
        folder = write_rnd(tmp_path / str(depth), num_hidden_layers=depth)
        config, params = load(folder)
        state = new_state(config, spec_of(2), [GREEDY])
        lowered = jax.jit(decode_round, static_argnums=(1, 2)).lower(params, config, spec_of(2), state)
        sizes.append(len(lowered.as_text().splitlines()))
    assert sizes[0] == sizes[1]


def test_the_state_may_be_donated(tmp_path):
    """No two fields share a buffer, neither in a new state nor in one that a step gave."""
    config, params = load(write_rnd(tmp_path / "rnd"))
    fill, step = (jax.jit(f, static_argnums=(1, 2), donate_argnums=3) for f in (prefill, decode_round))
    row = jnp.array([3], jnp.int32)
    state, _ = fill(
        params, config, spec_of(2), new_state(config, spec_of(2), [GREEDY]), jnp.ones((1, 8), int), row, row + 9
    )
    for _ in range(2):
        state, info = step(params, config, spec_of(2), state)
    assert int(info.num_tokens[0]) >= 1


def test_the_caches_backend_reaches_both_ops(tmp_path, monkeypatch):
    """Forced to kernels that cannot run here, each of them says so."""
    config, params = load(write_rnd(tmp_path / "rnd"))
    page_ids, window = jnp.ones((1, 1), jnp.int32), jnp.arange(4, 8)[None]
    placement = Placement(page_ids, jnp.zeros(1, jnp.int32), jnp.full(1, 4, jnp.int32), window)
    cache = KVCache.create(config, 2, 4, jnp.float32, backend="mosaic")
    arguments = params, config, jnp.zeros((1, 4), jnp.int32), cache, placement
    with pytest.raises(NotImplementedError, match="of norm_rope_append cannot: it needs a Hopper GPU"):
        forward(*arguments)
    append = transformer.norm_rope_append
    monkeypatch.setattr(transformer, "norm_rope_append", lambda *a, **k: append(*a, **k | {"backend": None}))
    with pytest.raises(NotImplementedError, match="of paged_mla cannot: it needs a Hopper GPU"):
        forward(*arguments)
