"""Draft lengths that change from round to round: what is computed does not depend on them, and nothing goes stale."""

import dataclasses
import gc
import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GREEDY, broken_laws, dense_greedy, poison, spec_of, step_through
from test_laws import PROMPTS, RULES, SOFT, check_proposal, counting

from jaxspec import SamplingParams, SpeculativeConfig
from jaxspec.decoding import Finish
from jaxspec.decoding import round as round_module
from jaxspec.drafters import MTPDrafter
from jaxspec.engine.draft_length import DraftLength

LENGTHS = [3, 0, 3, 1, 2, 0, 0, 3]
OTHER_LENGTHS = [1, 3, 0, 2]
RANDOM = ["rnd", pytest.param("rnd-2", marks=pytest.mark.slow), "rnd-3"]


def sampled(**changes):
    return [SamplingParams(temperature=1.0, seed=n, **changes) for n in range(len(PROMPTS))]


@pytest.fixture(scope="class", autouse=True)
def free_programs_of_a_class():
    """A program for every K makes too many for one module: see `free_programs`."""
    yield
    jax.clear_caches()
    gc.collect()


class TestTheOutputIsTheSame:
    @pytest.mark.parametrize("name", SOFT)
    @pytest.mark.parametrize("rule", RULES)
    def test_greedy_tokens_equal_the_cache_free_models(self, checkpoints, name, rule):
        run = step_through(checkpoints[name], PROMPTS, 20, spec_of(3, rule), draft_lengths=LENGTHS)
        assert run.tokens == [counting(p, 20) for p in PROMPTS]
        assert run.drafted > 0
        if name != "soft-mix":
            assert run.accepted == (run.drafted if name == "soft-hit" else 0)

    @pytest.mark.parametrize("name", RANDOM)
    @pytest.mark.parametrize("rule", RULES)
    def test_on_random_weights(self, checkpoints, name, rule):
        expected = [dense_greedy(checkpoints[name], p, 16) for p in PROMPTS]
        for lengths in (LENGTHS, OTHER_LENGTHS):
            assert (
                step_through(checkpoints[name], PROMPTS, 16, spec_of(3, rule), draft_lengths=lengths).tokens
                == expected
            )

    @pytest.mark.parametrize("name", ["soft-mix", "rnd", "rnd-3"])
    def test_sampled_tokens_equal_those_of_a_constant_length(self, checkpoints, name):
        model, spec = checkpoints[name], spec_of(3)
        expected = step_through(model, PROMPTS, 20, spec, params=sampled()).tokens
        for lengths in (LENGTHS, OTHER_LENGTHS, [0]):
            assert step_through(model, PROMPTS, 20, spec, params=sampled(), draft_lengths=lengths).tokens == expected

    @pytest.mark.parametrize("name", [*SOFT, "rnd-3"])
    def test_nan_in_slots_that_hold_no_verified_token_changes_nothing(self, checkpoints, name):
        model, spec = checkpoints[name], spec_of(3)
        clean = step_through(model, PROMPTS, 20, spec, draft_lengths=LENGTHS)
        dirty = step_through(model, PROMPTS, 20, spec, draft_lengths=LENGTHS, between=poison, fill=jnp.nan)
        assert dirty.tokens == clean.tokens
        assert [r.num_accepted.tolist() for r in dirty.rounds] == [r.num_accepted.tolist() for r in clean.rounds]

    def test_an_exhausted_pool_stalls_and_never_corrupts(self, checkpoints):
        prompts = [[i % 64 for i in range(16)], [i % 64 for i in range(30, 42)]]
        options = {"num_pages": 12, "between": poison, "draft_lengths": [1, 3, 0, 2]}
        run = step_through(checkpoints["soft-mix"], prompts, 4, spec_of(3), **options)
        assert run.tokens == [counting(p, 4) for p in prompts]
        assert any(bool(info.stalled.any()) for info in run.rounds)

    @pytest.mark.parametrize("rule", RULES)
    def test_sampled_output_has_the_targets_distribution(self, checkpoints, rule):
        """As `test_7_*` of the laws, for the first three tokens. Drafts in hand are cut off, then drawn again."""
        model = checkpoints["rnd"]
        _, config, weights = model
        prompt, rows, batch, spec = [3, 1, 4, 1, 5], 4000, 2000, spec_of(3, rule)
        triples = []
        for first in range(0, rows, batch):
            params = [SamplingParams(temperature=1.3, seed=first + i) for i in range(batch)]
            lengths = ([1, 0, 3], [0, 3, 1])[first // batch]
            triples += step_through(
                model, [prompt] * batch, 5, spec, params=params, draft_lengths=lengths, max_model_len=28
            ).tokens
        triples = np.array(triples)

        def exact(prefixes):
            logits = harness.DENSE(weights, config, jnp.asarray(prefixes, jnp.int32)).logits[:, -1]
            return np.asarray(jax.nn.softmax(logits / 1.3), np.float64)

        p_first = exact([prompt])[0]
        p_second = exact([[*prompt, t] for t in range(128)])
        p_third = np.zeros(128)
        for t in range(128):
            p_third += p_first[t] * p_second[t] @ exact([[*prompt, t, u] for u in range(128)])
        for drawn, expected in zip(triples[:, :3].T, (p_first, p_first @ p_second, p_third), strict=True):
            observed = np.bincount(drawn, minlength=128) / rows
            assert np.abs(observed - expected).sum() / 2 < 0.10


class TestTheLedger:
    def test_held_pages_never_exceed_the_bound_of_the_rounds_length(self, checkpoints):
        """A round needs the pages of kv_len + 1 + 2K, not of K_max: with one less it stalls. Then they go back."""
        model, spec = checkpoints["soft-miss"], spec_of(3)
        _, config, weights = model
        prompt = [i % 64 for i in range(8)]
        needed = {num_drafts: -(-(8 + 1 + 2 * num_drafts) // 4) for num_drafts in range(4)}
        for num_drafts, pages in needed.items():
            for short in (0, 1):
                state = harness.new_state(config, spec, [GREEDY])
                padded, lengths = harness.pad([prompt])
                state, _ = harness.PREFILL(weights, config, spec, state, padded, lengths, lengths + 9)
                spare = pages - int(state.table.num_pages[0]) - short
                state = state.replace(table=state.table.replace(num_free=jnp.int32(spare)))
                after, info = harness.ROUND(weights, config, spec, state, num_drafts)
                assert info.stalled.tolist() == [bool(short)]
                assert int(after.table.num_pages[0]) <= -(-int(after.kv_len[0]) // 4)

    def test_growth_is_one_and_the_accepted_whatever_the_length(self, checkpoints):
        """`step_through` checks the laws after every round, of which one is that capacity is kv_len."""
        seen = []
        run = step_through(
            checkpoints["soft-mix"],
            PROMPTS,
            30,
            spec_of(3),
            draft_lengths=LENGTHS,
            between=lambda s: seen.append(s) or s,
        )
        assert len(seen) > len(LENGTHS)
        assert run.finish == ["length"] * 3
        assert int(run.state.table.num_free) == run.state.table.free_ids.shape[0] - 1

    def test_a_round_is_as_wide_as_its_length(self, checkpoints):
        run = step_through(checkpoints["soft-hit"], PROMPTS, 20, spec_of(3), draft_lengths=LENGTHS)
        widths = [info.tokens.shape[1] - 1 for info in run.rounds[1:]]
        assert widths == (LENGTHS * 3)[: len(widths)]
        for info, width in zip(run.rounds[1:], widths, strict=True):
            assert int(info.num_drafts.max()) <= width
        assert run.state.drafts.tokens.shape == (3, 3)


class TestAcceptanceRecovers:
    def test_the_explicit_zero(self, checkpoints):
        """Where every draft is right: a round verifies what the one before drafted, as far as its own K allows."""
        run = step_through(
            checkpoints["soft-hit"], PROMPTS, 40, spec_of(3, "rejection"), draft_lengths=[3, 0, 0, 3, 3, 1, 3, 2, 3]
        )
        #           drafted before the round: 3  3  0  0  3  3  1  3  2
        assert [int(info.num_drafts[0]) for info in run.rounds[1:10]] == [3, 0, 0, 0, 3, 1, 1, 2, 2]
        assert [int(info.num_accepted[0]) for info in run.rounds[1:10]] == [3, 0, 0, 0, 3, 1, 1, 2, 2]

    @pytest.mark.parametrize("zeros", [1, 2, 5])
    def test_at_once_after_zeros(self, checkpoints, zeros):
        """After the round of K = 0 and the one that drafts anew, all is accepted; poison would show a hole."""
        lengths = [3, *[0] * zeros, 3, 3, 3]
        run = step_through(
            checkpoints["soft-hit"], PROMPTS, 30, spec_of(3, "rejection"), draft_lengths=lengths, between=poison
        )
        after = run.rounds[1 + 1 + zeros + 1]
        assert after.num_drafts.tolist() == after.num_accepted.tolist() == [3, 3, 3]

    @pytest.mark.parametrize("lengths", [LENGTHS, OTHER_LENGTHS], ids=str)
    @pytest.mark.parametrize("name", ["soft-hit", "soft-mix", "soft-miss", *RANDOM])
    def test_drafts_come_from_a_fresh_cache(self, checkpoints, name, lengths):
        """Law 6 whatever the rounds' K: every draft's q equals that of cache-free modules on the committed tokens."""
        counts = fresh_cache_counts(checkpoints[name], lengths)
        assert counts.count(0) >= 3
        assert {1, 2, 3} <= set(counts)

    @pytest.mark.parametrize("name", ["soft-mix", *RANDOM])
    def test_the_cache_of_every_module_equals_a_recomputed_one(self, checkpoints, name):
        """Every module's entries at verified positions equal one whole prefill's, those left over by K included."""
        model, spec, states = checkpoints[name], spec_of(3, "rejection"), []
        _, config, weights = model
        options = {"draft_lengths": LENGTHS, "between": lambda state: states.append(state) or state}
        run = step_through(model, PROMPTS, 14, spec, **options)
        for state in states[2:]:
            kept = state.kv_len.tolist()
            tokens = [(prompt + new)[:n] for prompt, new, n in zip(PROMPTS, run.tokens, kept, strict=True)]
            again = harness.new_state(config, spec, [GREEDY] * 3)
            padded, lengths = harness.pad(tokens)
            again, _ = harness.PREFILL(weights, config, spec, again, padded, lengths, lengths + 9)
            for row in np.flatnonzero(np.asarray(state.running)):
                entries = (harness.cached(s, row, kept[row]) for s in (state, again))
                np.testing.assert_allclose(*entries, atol=2e-5)
                np.testing.assert_allclose(state.drafter[row], again.drafter[row], atol=2e-5)


def fresh_cache_counts(model, lengths):
    """Counts of drafts after each round, whose q was compared with the cache-free modules'."""
    _, config, weights = model
    spec, counts = spec_of(3, "rejection"), []
    prompts = [[(5 * i + n) % 64 for i in range(n)] for n in (1, 4, 10)]
    committed = [list(p) for p in prompts]
    state = harness.new_state(config, spec, sampled())
    padded, prompt_len = harness.pad(prompts)
    state, info = harness.PREFILL(weights, config, spec, state, padded, prompt_len, prompt_len + 18)
    for num_drafts in 4 * lengths:
        for row, n in enumerate(info.num_tokens.tolist()):
            committed[row] += info.tokens[row, :n].tolist()
            count = int(state.drafts.count[row])
            counts.append(count)
            if count:
                check_proposal(config, weights, state, row, committed[row])
        if not bool(state.running.any()):
            break
        state, info = harness.ROUND(weights, config, spec, state, num_drafts)
    return counts


class TestPerRequest:
    def test_a_request_has_its_own_maximum(self, checkpoints):
        model, wanted = checkpoints["soft-hit"], [0, 1, None]
        params = [SamplingParams(temperature=0.0, num_speculative_tokens=k) for k in wanted]
        run = step_through(model, PROMPTS, 20, spec_of(3), params=params)
        assert run.tokens == [counting(p, 20) for p in PROMPTS]
        assert [max(int(info.num_drafts[row]) for info in run.rounds) for row in range(3)] == [0, 1, 3]
        assert run.accepted == run.drafted

    @pytest.mark.parametrize("lengths", [None, LENGTHS])
    def test_sampled_output_is_unchanged_by_it(self, checkpoints, lengths):
        model, spec = checkpoints["rnd"], spec_of(3)
        expected = step_through(model, PROMPTS, 20, spec, params=sampled()).tokens
        for most in (0, 1, 2):
            params = sampled(num_speculative_tokens=most)
            run = step_through(model, PROMPTS, 20, spec, params=params, draft_lengths=lengths)
            assert run.tokens == expected
            assert max(int(info.num_drafts.max()) for info in run.rounds) == most

    @pytest.mark.parametrize("value", [-1, 65, 1.0, True, "1"])
    def test_other_values_are_refused(self, value):
        message = f"expected num_speculative_tokens to be an integer in 0..64, got {value!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            SamplingParams(num_speculative_tokens=value)


class TestOffForGood:
    def test_nothing_drafted_is_left_and_the_drafter_does_not_run(self, checkpoints, fresh):
        """Rows that have drafts in hand go on without; a prompt that ends later gets none."""
        _, config, weights = checkpoints["soft-hit"]
        spec, off = spec_of(3), spec_of(0)
        state = harness.new_state(config, spec, [GREEDY] * 2)
        padded, lengths = harness.pad([[5, 6], [9]])
        first = lengths * jnp.asarray([1, 0])
        state, _ = harness.PREFILL(weights, config, spec, state, padded, first, first + 20)
        assert state.drafts.count.tolist() == [3, 0]
        fresh.setattr(MTPDrafter, "draft", None)

        stale = state.replace(drafts=state.drafts.replace(count=jnp.asarray([3, 2])))
        second = lengths * jnp.asarray([0, 1])
        state, info = harness.PREFILL(weights, config, off, stale, padded, second, second + 20)
        assert (info.tokens[1, 0], state.drafts.count.tolist()) == (10, [0, 0])
        for step in range(1, 4):
            state, info = harness.ROUND(weights, config, off, state)
            assert (info.tokens.tolist(), info.num_drafts.tolist()) == ([[7 + step], [10 + step]], [0, 0])
            assert (state.drafts.count.tolist(), broken_laws(state)) == ([0, 0], [])

    def test_drafts_in_hand_are_not_verified(self, checkpoints):
        _, config, weights = checkpoints["soft-hit"]
        state = harness.new_state(config, spec_of(3), [GREEDY])
        padded, lengths = harness.pad([[5, 6]])
        state, _ = harness.PREFILL(weights, config, spec_of(3), state, padded, lengths, lengths + 20)
        state, info = harness.ROUND(weights, config, spec_of(0), state)
        assert (info.tokens.tolist(), info.num_drafts.tolist(), state.drafts.count.tolist()) == ([[8]], [0], [0])
        # Should it be turned on again after all, the tokens are right still, drafted from whatever the cache holds.
        tokens = []
        while bool(state.running.any()):
            state, info = harness.ROUND(weights, config, spec_of(3), state)
            tokens += info.tokens[0, : int(info.num_tokens[0])].tolist()
        assert tokens == list(range(9, 27))
        assert state.finish.tolist() == [Finish.LENGTH]


class TestRefused:
    @pytest.mark.parametrize("num_drafts", [-1, 3])
    def test_a_length_out_of_range(self, checkpoints, num_drafts):
        _, config, weights = checkpoints["soft-hit"]
        state = harness.new_state(config, spec_of(3), [GREEDY])
        with pytest.raises(ValueError, match=rf"num_drafts: got {num_drafts}, expected 0\.\.2"):
            round_module.decode_round(weights, config, spec_of(2), state, num_drafts)

    def test_more_than_the_state_has_room_for(self, checkpoints):
        _, config, weights = checkpoints["soft-hit"]
        state = harness.new_state(config, spec_of(2), [GREEDY])
        padded, lengths = harness.pad([[1]])
        message = "num_speculative_tokens: got 3, expected at most the 2 of the state"
        with pytest.raises(ValueError, match=message):
            round_module.decode_round(weights, config, spec_of(3), state)
        with pytest.raises(ValueError, match=message):
            round_module.prefill(weights, config, spec_of(3), state, padded, lengths, lengths + 9)


class TestEveryCheckCanFail:
    """Law 8: a drafter that does not stay warm is caught."""

    def test_zero_drafts_without_a_warm_run(self, checkpoints, fresh):
        real = round_module._draft

        def cold(params, config, spec, state, verified, rows, num_drafts):
            if num_drafts:
                return real(params, config, spec, state, verified, rows, num_drafts)
            return state.replace(drafts=state.drafts.replace(count=jnp.zeros_like(state.drafts.count)))

        fresh.setattr(round_module, "_draft", cold)
        for name in ("soft-mix", "rnd-3"):
            with pytest.raises(AssertionError, match="Not equal to tolerance"):
                fresh_cache_counts(checkpoints[name], LENGTHS)

    def test_modules_left_over_that_are_skipped(self, checkpoints, fresh):
        """A chain as long as this round's K leaves holes in the later modules' caches."""
        real = MTPDrafter.draft

        def short(self, params, config, rule, verified, count, num_drafts, sampling, cache, state):
            used = max(num_drafts - 1, 0)
            arguments = (params, config, rule, verified, count, num_drafts, sampling, cache)
            drafts, cache, part = real(self, *arguments, state[:, :used])
            return drafts, cache, jnp.concatenate([part, state[:, part.shape[1] :]], axis=1)

        fresh.setattr(MTPDrafter, "draft", short)
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            fresh_cache_counts(checkpoints["rnd-3"], LENGTHS)


class TestChoice:
    def test_without_a_schedule_it_is_the_speculations(self):
        policy = DraftLength(SpeculativeConfig(num_speculative_tokens=3))
        assert [policy.choose(rows, 64) for rows in (1, 7, 10_000)] == [3, 3, 3]
        assert policy.values == (0, 3)

    @pytest.mark.parametrize(
        "schedule", [{4: 5, 1: 4, 16: 1, 8: 0}, [(4, 5), (16, 1), [1, 4], (8, 0)], ((1, 4), (4, 5), (8, 0), (16, 1))]
    )
    def test_the_schedules_edges(self, schedule):
        spec = SpeculativeConfig(num_speculative_tokens=6, draft_len_schedule=schedule)
        assert spec.draft_len_schedule == ((1, 4), (4, 5), (8, 0), (16, 1))
        policy = DraftLength(spec)
        rows = [1, 2, 4, 5, 8, 9, 16, 17, 1000]
        assert [policy.choose(n, 64) for n in rows] == [4, 5, 5, 0, 0, 1, 1, 0, 0]
        assert policy.values == (0, 1, 4, 5)

    def test_the_least_program_that_gives_every_request_what_it_wants(self):
        """There is none for 2 drafts, so a request that wants 2 verifies 2 in a round of 3."""
        policy = DraftLength(SpeculativeConfig(num_speculative_tokens=3, draft_len_schedule={2: 3, 4: 1}))
        assert [policy.choose(2, most) for most in (0, 1, 2, 3, 64)] == [0, 1, 3, 3, 3]
        assert [policy.choose(4, most) for most in (0, 1, 2)] == [0, 1, 1]

    def test_every_choice_is_among_the_values(self):
        for schedule in (None, {1: 4}, {2: 1, 5: 3}, {8: 0}):
            policy = DraftLength(SpeculativeConfig(num_speculative_tokens=4, draft_len_schedule=schedule))
            assert {policy.choose(n, most) for n in range(1, 9) for most in range(66)} == set(policy.values)

    def test_zero_drafts_are_off_from_the_start(self):
        policy = DraftLength(SpeculativeConfig(num_speculative_tokens=0))
        assert (policy.is_off, policy.choose(1, 64), policy.values) == (True, 0, (0,))


class TestGate:
    def gated(self, window, threshold):
        return DraftLength(SpeculativeConfig(acceptance_rate_window_size=window, acceptance_rate_threshold=threshold))

    def test_a_mean_below_the_threshold_turns_drafting_off_for_good(self):
        policy = self.gated(2, 0.5)
        policy.observe(10, 2)
        assert not policy.is_off  # the window is not full
        policy.observe(10, 7)
        assert (policy.is_off, policy.choose(1, 64)) == (True, 0)
        for _ in range(4):
            policy.observe(10, 10)
        assert (policy.is_off, policy.choose(1, 64)) == (True, 0)

    def test_a_mean_at_the_threshold_does_not(self):
        policy = self.gated(2, 0.5)
        policy.observe(10, 4)
        policy.observe(10, 6)
        assert not policy.is_off

    def test_the_mean_is_of_the_last_rounds_each_counted_once(self):
        policy = self.gated(2, 0.5)
        policy.observe(1000, 0)  # over all drafts, these two would have a mean of 0.01
        policy.observe(10, 10)
        assert not policy.is_off
        policy.observe(10, 1)
        assert not policy.is_off
        policy.observe(10, 8)
        assert policy.is_off

    def test_rounds_without_drafts_do_not_count(self):
        policy = self.gated(1, 0.5)
        policy.observe(0, 0)
        assert not policy.is_off
        policy.observe(1, 0)
        assert policy.is_off

    def test_no_gate(self):
        policy = DraftLength(SpeculativeConfig())
        for _ in range(100):
            policy.observe(10, 0)
        assert not policy.is_off


class TestConfig:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"draft_len_schedule": {0: 1}}, "an integer batch size in draft_len_schedule >= 1, got 0"),
            ({"draft_len_schedule": {True: 1}}, "an integer batch size in draft_len_schedule >= 1, got True"),
            ({"draft_len_schedule": {1: -1}}, "an integer draft length in draft_len_schedule >= 0, got -1"),
            ({"draft_len_schedule": {1: 2.0}}, "an integer draft length in draft_len_schedule >= 0, got 2.0"),
            ({"draft_len_schedule": {1: 4}}, "draft_len_schedule within num_speculative_tokens 3, got 4"),
            ({"draft_len_schedule": [(1, 2), (1, 3)]}, "each batch size once in draft_len_schedule, got"),
            ({"draft_len_schedule": {}}, "a draft_len_schedule that maps batch sizes to draft lengths, got {}"),
            (
                {"draft_len_schedule": [1, 2]},
                "a draft_len_schedule that maps batch sizes to draft lengths, got [1, 2]",
            ),
            ({"draft_len_schedule": 3}, "a draft_len_schedule that maps batch sizes to draft lengths, got 3"),
            ({"draft_len_schedule": "12"}, "a draft_len_schedule that maps batch sizes to draft lengths, got '12'"),
            (
                {"acceptance_rate_window_size": 5},
                "both acceptance_rate_window_size and acceptance_rate_threshold, or neither, got (5, None)",
            ),
            ({"acceptance_rate_threshold": 0.5}, "or neither, got (None, 0.5)"),
            (
                {"acceptance_rate_window_size": 0, "acceptance_rate_threshold": 0.5},
                "an integer acceptance_rate_window_size >= 1, got 0",
            ),
            (
                {"acceptance_rate_window_size": 5, "acceptance_rate_threshold": 1.6},
                "acceptance_rate_threshold in 0..1, got 1.6",
            ),
            (
                {"acceptance_rate_window_size": 5, "acceptance_rate_threshold": float("nan")},
                "a number acceptance_rate_threshold >= 0.0, got nan",
            ),
        ],
    )
    def test_values_are_refused(self, fields, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            SpeculativeConfig(**fields)

    def test_what_the_host_looks_at_compiles_no_other_programs(self):
        plain = SpeculativeConfig(num_speculative_tokens=2, verification="rejection")
        options = {"draft_len_schedule": {1: 2}, "acceptance_rate_window_size": 5, "acceptance_rate_threshold": 0.6}
        given = dataclasses.replace(plain, **options)
        assert given != plain
        assert given.for_programs == plain
        assert hash(given.for_programs) == hash(plain)
        assert hash(given) == hash(dataclasses.replace(plain, **options | {"draft_len_schedule": [(1, 2)]}))
