"""The design's laws, on checkpoints whose acceptance is fixed by the file: 0%, mixed, 100% and random."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    broken_laws,
    cached,
    dense_greedy,
    poison,
    run_loop,
    shuffle_free_pages,
    spec_of,
    step_through,
)

from jaxspec import SamplingParams, apply_head
from jaxspec.cache import capacity as ledger_ops
from jaxspec.decoding import Finish
from jaxspec.decoding import round as round_module
from jaxspec.models import dense
from jaxspec.models.primitives import rms_norm, rope_angles

SOFT = ["soft-hit", "soft-mix", "soft-miss"]
PROMPTS = [[3], [10, 11, 12, 13, 14], [40, 7, 9, 22, 1, 2, 3, 60, 61]]
RULES = ["coupled", "rejection"]


def counting(prompt, num_new):
    return [(prompt[-1] + i) % 64 for i in range(1, num_new + 1)]


@pytest.mark.parametrize("name", SOFT)
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_1_greedy_tokens_equal_the_cache_free_models(checkpoints, name, num_drafts):
    run = step_through(checkpoints[name], PROMPTS, 20, spec_of(num_drafts))
    assert run.tokens == [counting(p, 20) for p in PROMPTS]
    assert run.tokens[1] == dense_greedy(checkpoints[name], PROMPTS[1], 20)
    assert run.finish == ["length"] * 3
    if num_drafts and name != "soft-mix":
        assert run.accepted == (run.drafted if name == "soft-hit" else 0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["rnd", "rnd-2", "rnd-3"])
def test_1_on_random_weights(checkpoints, name, rule):
    expected = [dense_greedy(checkpoints[name], p, 16) for p in PROMPTS]
    assert step_through(checkpoints[name], PROMPTS, 16, spec_of(3, rule)).tokens == expected


def test_1_whatever_the_driver_the_page_order_and_the_batch(checkpoints):
    model, spec = checkpoints["rnd"], spec_of(3)
    expected = step_through(model, PROMPTS, 16, spec).tokens
    assert run_loop(model, PROMPTS, 16, spec)[1] == expected
    assert step_through(model, PROMPTS, 16, spec, between=shuffle_free_pages).tokens == expected
    assert step_through(model, PROMPTS, 16, spec, page_size=16).tokens == expected
    alone = [step_through(model, [p], 16, spec).tokens[0] for p in PROMPTS]
    assert alone == expected


@pytest.mark.parametrize("name", [*SOFT, "rnd", "rnd-3"])
def test_2_nan_in_pages_a_row_does_not_own_changes_nothing(checkpoints, name):
    model, spec = checkpoints[name], spec_of(3)
    clean = step_through(model, PROMPTS, 20, spec)
    dirty = step_through(model, PROMPTS, 20, spec, between=poison, fill=jnp.nan)
    assert dirty.tokens == clean.tokens
    for a, b in zip(clean.rounds, dirty.rounds, strict=True):
        assert a.num_accepted.tolist() == b.num_accepted.tolist()


def test_2_every_page_edge(checkpoints):
    """Field case a1: prompts of 1..20 tokens over pages of 4, everything not verified filled with NaN."""
    model = checkpoints["soft-hit"]
    for first in range(1, 21, 5):
        prompts = [[(7 * n + i) % 64 for i in range(n)] for n in range(first, first + 5)]
        run = step_through(model, prompts, 24, spec_of(3), between=poison)
        assert run.tokens == [counting(p, 24) for p in prompts]
        assert run.accepted == run.drafted > 0


def test_2_lengths_that_are_multiples_of_the_page(checkpoints):
    """Field case a5: an allocated page is not a used page. Unowned pages hold 1000."""
    model = checkpoints["rnd"]
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
    expected = dense_greedy(model, prompt, 20)
    assert step_through(model, [prompt], 20, spec_of(3), page_size=16, fill=1e3).tokens == [expected]


def test_3_one_trace_and_nothing_compiled_again(checkpoints):
    model = checkpoints["soft-mix"]
    step_through(model, PROMPTS, 20, spec_of(2))
    before = harness.ROUND._cache_size(), harness.PREFILL._cache_size()
    for name in SOFT:
        step_through(checkpoints[name], PROMPTS[::-1], [3, 20, 9], spec_of(2))
    assert (harness.ROUND._cache_size(), harness.PREFILL._cache_size()) == before


@pytest.mark.parametrize("name", SOFT)
def test_4_every_page_comes_home(checkpoints, name):
    """Field case a3 among them; `step_through` checks owned + free = all after every step."""
    run = step_through(checkpoints[name], PROMPTS, [1, 7, 30], spec_of(3))
    assert int(run.state.table.num_free) == run.state.table.free_ids.shape[0] - 1
    assert [len(t) for t in run.tokens] == [1, 7, 30]
    assert run.state.capacity.capacity.tolist() == [0, 0, 0]


def test_4_held_pages_never_exceed_their_bound(checkpoints):
    """Field case a2: nothing accepted, 50 new tokens; held pages stay within ceil((kv_len + 1 + 2K) / S)."""
    num_drafts, seen = 3, []

    def watch(state):
        bound = -(-(state.kv_len + 1 + 2 * num_drafts) // state.table.page_size)
        assert bool(jnp.all(state.table.num_pages <= bound))
        seen.append(int(state.table.num_pages[0]))
        return state

    step_through(checkpoints["soft-miss"], [[1, 2, 3, 4, 5]], 50, spec_of(num_drafts), between=watch)
    assert max(seen) <= -(-(5 + 50 + 2 * num_drafts + 1) // 4)


def test_5_an_exhausted_pool_stalls_and_never_corrupts(checkpoints):
    """Field case f9: two prompts fill the pool; one waits for the other, both finish as if alone."""
    model, prompts = checkpoints["soft-mix"], [[i % 64 for i in range(16)], [i % 64 for i in range(30, 42)]]
    run = step_through(model, prompts, 4, spec_of(3), num_pages=10, between=poison)
    assert run.tokens == [counting(p, 4) for p in prompts]
    assert any(bool(info.stalled.any()) for info in run.rounds)


def test_5_a_prompt_without_pages_fails_alone(checkpoints):
    run = step_through(checkpoints["soft-hit"], [[1, 2], [9], list(range(20))], 6, spec_of(3), num_pages=6)
    assert run.finish == ["length", "length", "error"]
    assert run.tokens == [counting([2], 6), counting([9], 6), []]


def test_5_when_no_row_can_go_on_the_loop_ends(checkpoints):
    state, tokens = run_loop(checkpoints["soft-hit"], [[1, 2, 3], [5, 6, 7]], 30, spec_of(3), num_pages=7)
    assert state.running.tolist() == [True, True]
    assert tokens == [counting([3], len(tokens[0])), counting([7], len(tokens[1]))]
    assert broken_laws(state) == []


@pytest.mark.parametrize("name", ["soft-hit", "soft-mix", "soft-miss", "rnd", "rnd-yarn", "rnd-2", "rnd-3"])
def test_6_drafts_come_from_a_fresh_cache(checkpoints, name):
    """The proposal's q after every round equals that of cache-free MTP modules on the committed tokens."""
    model = checkpoints[name]
    _, config, weights = model
    spec, checked = spec_of(3, "rejection"), 0
    prompts = [[(5 * i + n) % 64 for i in range(n)] for n in (1, 4, 10)]
    params = [SamplingParams(temperature=1.0, seed=n) for n in range(3)]
    committed = [list(p) for p in prompts]

    def check(state):
        nonlocal checked
        for row in range(3):
            count = int(state.drafts.count[row])
            if not count:
                continue
            check_proposal(config, weights, state, row, committed[row])
            checked += count
        return state

    _drive(model, prompts, params, spec, committed, check)
    assert checked > 20


def _drive(model, prompts, params, spec, committed, check):
    _, config, weights = model
    state = harness.new_state(config, spec, params)
    padded, lengths = harness.pad(prompts)
    state, info = harness.PREFILL(weights, config, spec, state, padded, lengths, lengths + 14)
    while True:
        for row, n in enumerate(info.num_tokens.tolist()):
            committed[row] += info.tokens[row, :n].tolist()
        check(state)
        if not bool(state.running.any()):
            return
        state, info = harness.ROUND(weights, config, spec, state)


def check_proposal(config, weights, state, row, committed):
    """Every draft's q equals that of cache-free modules on the committed tokens, as far as its entries reach."""
    assert len(committed) == int(state.kv_len[row]) + 1
    count = int(state.drafts.count[row])
    expected = mtp_reference(config, weights, committed, state.drafts.tokens[row, :count].tolist())
    ids, probs = (np.asarray(x[row]) for x in (state.drafts.proposal.ids, state.drafts.proposal.probs))
    for step in range(count):
        q = np.zeros(config.vocab_size)
        q[ids[step]] = probs[step]
        top = np.sort(expected[step])[-ids.shape[1] :].sum()
        kept = np.isin(np.arange(len(q)), ids[step])
        np.testing.assert_allclose(q, np.where(kept, expected[step] / top, 0), atol=2e-5)


def mtp_reference(config, weights, committed, drafts):
    """q of each draft by cache-free modules: a chain over the checkpoint's, then the last one on its own states."""
    width, known = 48, len(committed)
    tokens = jnp.asarray([committed + list(drafts) + [0] * (width - known - len(drafts))], jnp.int32)
    states, found, at = harness.DENSE(weights, config, tokens).hidden, [], known - 2
    for step in range(len(drafts)):
        module = min(step, config.num_mtp_layers - 1)
        if step > module:  # recycled: its state becomes the input one position on
            at += 1
            states = inputs.at[0, at].set(states[0, at - 1])
        inputs = states
        states = MODULE(weights, config, module, tokens, inputs)
        found.append(np.asarray(jax.nn.softmax(apply_head(weights, states[0, at])), np.float64))
    return found


def _module(weights, config, index, tokens, below):
    module, eps = jax.tree.map(lambda w: w[index], weights.mtp), config.rms_norm_eps
    ahead = weights.embed[jnp.roll(tokens, -(index + 1), axis=1)]
    joined = jnp.concatenate([rms_norm(ahead, module.enorm, eps), rms_norm(below, module.hnorm, eps)], -1)
    angles = rope_angles(config, jnp.arange(tokens.shape[1])[None])
    x, _ = dense._layer(module.layer, config, joined @ module.eh_proj, angles)
    return rms_norm(x, module.norm, eps)


MODULE = jax.jit(_module, static_argnames=("config", "index"))


@pytest.mark.parametrize("name", ["soft-hit", "soft-mix", "rnd", "rnd-3"])
def test_6_the_draft_cache_equals_a_recomputed_one(checkpoints, name):
    """Field case f5: at every round, every layer's entries at verified positions equal one whole prefill's."""
    model, spec, prompts = checkpoints[name], spec_of(3), [[1, 2, 3], [9]]
    _, config, weights = model
    states = []
    run = step_through(model, prompts, 14, spec, between=lambda s: states.append(s) or s)
    verified = config.num_cached_layers
    for state in states[2:]:
        for row, prompt in enumerate(prompts):
            kv_len = int(state.kv_len[row])
            if not bool(state.running[row]):
                continue
            tokens = (prompt + run.tokens[row])[:kv_len]
            fresh = harness.new_state(config, spec, [harness.GREEDY])
            padded, lengths = harness.pad([tokens])
            fresh, _ = harness.PREFILL(weights, config, spec, fresh, padded, lengths, lengths + 9)
            np.testing.assert_allclose(
                cached(state, row, kv_len)[:verified], cached(fresh, 0, kv_len)[:verified], atol=2e-5
            )


@pytest.mark.parametrize("rule", RULES)
def test_7_sampled_output_has_the_targets_distribution(checkpoints, rule):
    """First two tokens of 4,000 seeds against exact probabilities from the cache-free model.

    With 128 tokens, the total variation of 4,000 true draws has mean about 0.07; the bound is 0.10, over eight
    standard deviations beyond it. Drafts taken for granted, or a residual forgotten, give more than 0.3.
    """
    model = checkpoints["rnd"]
    _, config, weights = model
    prompt, rows, batch = [3, 1, 4, 1, 5], 4000, 500
    pairs = []
    for first in range(0, rows, batch):
        params = [SamplingParams(temperature=1.3, seed=first + i) for i in range(batch)]
        _, tokens = run_loop(model, [prompt] * batch, 3, spec_of(2, rule), params=params, max_model_len=28)
        pairs += tokens
    pairs = np.array(pairs)
    logits = harness.DENSE(weights, config, jnp.asarray([prompt], jnp.int32)).logits[0, -1]
    p_first = np.asarray(jax.nn.softmax(logits / 1.3), np.float64)
    every = jnp.asarray([[*prompt, t] for t in range(128)], jnp.int32)
    p_second = np.asarray(jax.nn.softmax(harness.DENSE(weights, config, every).logits[:, -1] / 1.3), np.float64)
    for drawn, exact in ((pairs[:, 0], p_first), (pairs[:, 1], p_first @ p_second)):
        observed = np.bincount(drawn, minlength=128) / rows
        assert np.abs(observed - exact).sum() / 2 < 0.10


class TestEveryCheckCanFail:
    """Law 8: each capacity rule has a mutant, and a law above catches it."""

    def test_growth_by_1_plus_k(self, checkpoints, fresh):
        _, config, weights = checkpoints["soft-hit"]
        state = harness.new_state(config, spec_of(3), [harness.GREEDY])
        fresh.setattr(ledger_ops, "growth", lambda num_drafts: 1 + num_drafts)
        with pytest.raises(ValueError, match="write 6 slots; got a window of 4"):
            harness.ROUND(weights, config, spec_of(3), state)
        with pytest.raises(AssertionError, match="capacity is not kv_len"):
            step_through(checkpoints["soft-hit"], PROMPTS, 8, spec_of(3))

    def test_slack_never_reclaimed(self, checkpoints, fresh):
        real = ledger_ops.settle

        def leaky(ledger, rows, num_accepted, committed, num_drafts):
            capacity, table = ledger
            kept = capacity.replace(slack=jnp.zeros_like(capacity.slack))
            return real((kept, table), rows, num_accepted, committed, num_drafts)

        fresh.setattr(ledger_ops, "settle", leaky)
        with pytest.raises(AssertionError, match="capacity is not kv_len"):
            step_through(checkpoints["soft-miss"], PROMPTS, 8, spec_of(3))

    def test_lengths_from_the_host(self, checkpoints, fresh):
        """The host's guess, that every draft is accepted, in place of the count on the device."""
        real = round_module._commit

        def hopeful(state, verdict, rows, healthy):
            after, info = real(state, verdict, rows, healthy)
            guess = jnp.where(rows, state.kv_len + verdict.tokens.shape[1], state.kv_len)
            return after.replace(kv_len=jnp.where(after.running, guess, after.kv_len)), info

        fresh.setattr(round_module, "_commit", hopeful)
        model = checkpoints["rnd"]
        assert step_through(model, PROMPTS, 16, spec_of(3)).tokens != [dense_greedy(model, p, 16) for p in PROMPTS]

    def test_a_table_too_narrow_is_a_shape_error(self, checkpoints):
        model, spec = checkpoints["soft-hit"], spec_of(3)
        narrow = harness.new_state(model[1], spec, [harness.GREEDY]).replace(max_model_len=67)
        with pytest.raises(ValueError, match="has 18 columns of 4 tokens; max_model_len 67 with 3 drafts needs 19"):
            round_module.decode_round(model[2], model[1], spec, narrow)


def test_non_finite_logits_fail_that_row_only(checkpoints):
    model = checkpoints["rnd"]
    folder, config, weights = model
    broken = (folder, config, weights.replace(embed=weights.embed.at[77].set(jnp.nan)))
    prompts = [[1, 2, 3], [5, 77, 6], [9]]
    run = step_through(broken, prompts, 10, spec_of(3))
    expected = [dense_greedy(model, p, 10) for p in prompts]
    assert 77 not in expected[0] + expected[2]
    assert run.finish == ["length", "error", "length"]
    assert (run.tokens[0], run.tokens[1], run.tokens[2]) == (expected[0], [], expected[2])
    assert int(run.state.table.num_free) == run.state.table.free_ids.shape[0] - 1
    assert run.state.finish.tolist()[1] == Finish.ERROR
