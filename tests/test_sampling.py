"""Parameters, noise, the logits chain and the end of an output, against slow plain references."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sampling.acceptance import sample, stop_and_limit
from jaxspec.sampling.logits import argmax, log_probs
from jaxspec.sampling.params import SamplingParams, SamplingState
from jaxspec.sampling.random import Purpose, gumbel, row_keys, uniform

jit_log_probs = jax.jit(log_probs)
jit_sample = jax.jit(sample)


def state(*params: SamplingParams, seeds=None) -> SamplingState:
    seeds = seeds or range(len(params))
    return SamplingState.stack([(p, seed, p.stop_token_ids) for p, seed in zip(params, seeds, strict=True)], 2)


def kept_tokens(logits: np.ndarray, params: SamplingParams, slack: float) -> np.ndarray:
    """Which tokens survive the filters, in float64; thresholds of probability loosened by the fraction `slack`."""
    gaps = (logits.max() - logits) / params.temperature
    kept = np.exp(-gaps) >= params.min_p * (1 - slack)
    if params.top_k > 0:
        kept &= gaps <= np.sort(np.where(kept, gaps, np.inf))[: params.top_k].max()
    if params.top_p < 1:
        p = np.where(kept, np.exp(-gaps), 0)
        order = np.argsort(gaps)
        enough = np.cumsum(p[order]) >= params.top_p * (1 + slack) * p.sum()
        # Never enough: the loosened threshold is above 1.
        kept &= gaps <= (gaps[order[np.argmax(enough)]] if enough.any() else np.inf)
    return kept


def check_log_probs(got: np.ndarray, logits: np.ndarray, params: SamplingParams) -> None:
    """`got` has the reference's support, up to thresholds met within rounding, and its values there."""
    logits = logits.astype(np.float64)
    kept = got > -np.inf
    assert (kept >= kept_tokens(logits, params, -1e-5)).all()
    assert (kept <= kept_tokens(logits, params, 1e-5)).all()
    scaled = np.where(kept, (logits - logits.max()) / params.temperature, -np.inf)
    expected = scaled - np.log(np.exp(scaled).sum())
    np.testing.assert_allclose(got[kept], expected[kept], rtol=2e-6, atol=2e-6)


# Parameters


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"temperature": math.nan}, "temperature to be a number, got nan"),
        ({"temperature": math.inf}, "temperature to be a finite float32 >= 0, got inf"),
        ({"temperature": -0.1}, "temperature to be a finite float32 >= 0, got -0.1"),
        ({"temperature": 1e39}, "temperature to be a finite float32"),
        ({"temperature": True}, "temperature to be a number, got True"),
        ({"top_p": 0.0}, r"top_p in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p in \(0, 1\], got 1.1"),
        ({"top_p": math.nan}, "top_p to be a number, got nan"),
        ({"top_k": -2}, "top_k to be an integer in -1..2147483647, got -2"),
        ({"top_k": True}, "top_k to be an integer .*, got True"),
        ({"min_p": -0.1}, r"min_p in \[0, 1\], got -0.1"),
        ({"min_p": 1.5}, r"min_p in \[0, 1\], got 1.5"),
        ({"seed": -1}, "seed to be an integer in 0..9223372036854775807, got -1"),
        ({"seed": 2**63}, "seed to be an integer"),
        ({"seed": False}, "seed to be an integer"),
        ({"max_tokens": 0}, "max_tokens to be an integer in 1..2147483647, got 0"),
        ({"max_tokens": True}, "max_tokens to be an integer"),
        ({"stop_token_ids": (3, -1)}, "every stop token id to be an integer in 0..2147483647, got -1"),
        ({"stop_token_ids": [True]}, "every stop token id to be an integer"),
    ],
)
def test_params_refuse_what_they_cannot_honour(option, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**option)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "1", "temperature to be a number, got '1'"),
        ("top_k", 1.0, "top_k to be an integer in .*, got 1.0"),
        ("seed", 1.0, "seed to be an integer in .*, got 1.0"),
        ("stop_token_ids", 3, "stop_token_ids to be a list or tuple, got 3"),
        ("stop_token_ids", ("a",), "every stop token id to be an integer in .*, got 'a'"),
        ("ignore_eos", 1, "ignore_eos to be a bool, got 1"),
    ],
)
def test_params_refuse_wrong_types(name, value, message):
    params = SamplingParams()
    # Past the constructor, where the type checker of the test run would be the first to object.
    object.__setattr__(params, name, value)
    with pytest.raises(ValueError, match=message):
        params.__post_init__()


def test_params_have_vllm_defaults_and_no_other_options():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.seed, params.max_tokens, params.stop_token_ids, params.ignore_eos) == (None, 16, (), False)
    with pytest.raises(TypeError, match="presence_penalty"):
        SamplingParams(presence_penalty=1.0)
    assert hash(SamplingParams(stop_token_ids=[1, 2])) == hash(SamplingParams(stop_token_ids=(1, 2)))
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, seed=2**63 - 1, max_tokens=None)


def test_stack_builds_the_arrays():
    rows = [(SamplingParams(top_k=-1, temperature=0), 2**63 - 1, (4,)), (SamplingParams(min_p=0.25, top_k=9), 5, ())]
    got = SamplingState.stack(rows, 2)
    np.testing.assert_array_equal(got.temperature, np.float32([0, 1]))
    np.testing.assert_array_equal(got.top_k, [0, 9])
    np.testing.assert_array_equal(got.min_p, np.float32([0, 0.25]))
    np.testing.assert_array_equal(got.seed, [[2**31 - 1, 2**32 - 1], [0, 5]])
    np.testing.assert_array_equal(got.stop_ids, [[4, -1], [-1, -1]])
    np.testing.assert_array_equal(got.is_greedy, [True, False])
    assert SamplingState.stack([], 0).stop_ids.shape == (0, 0)
    with jax.transfer_guard("disallow"):
        SamplingState.stack(rows, 2)
    with pytest.raises(ValueError, match="at most 1 stop token ids, got 2"):
        SamplingState.stack([(SamplingParams(), 0, (1, 2))], 1)
    with pytest.raises(ValueError, match="seed to be an integer"):
        SamplingState.stack([(SamplingParams(), -1, ())], 1)


# Noise


def test_keys_differ_by_seed_position_and_purpose():
    seeds = jnp.array([[hi, lo] for hi in (0, 1, 2**31 - 1) for lo in (0, 1, 2, 2**32 - 1)], jnp.uint32)
    positions = jnp.tile(jnp.int32([[0, 1, 2, 3, 2**29, 2**30 - 1]]), (len(seeds), 1))
    data = [jax.random.key_data(row_keys(seeds, positions, purpose)) for purpose in Purpose]
    words = np.stack(data).reshape(-1, 2)
    assert len(np.unique(words, axis=0)) == len(words) == 12 * 6 * len(Purpose)


def test_noise_ignores_the_process_wide_random_settings():
    def draw():
        keys = row_keys(jnp.uint32([[0, 7]]), jnp.int32([[3, 4]]), Purpose.SAMPLE)
        return jnp.concatenate([gumbel(keys, 5), uniform(keys)[:, :, None]], axis=-1)

    expected = np.asarray(draw())
    for settings_ in (jax.default_prng_impl("rbg"), jax.threefry_partitionable(False)):
        with settings_:
            np.testing.assert_array_equal(draw(), expected)
    # Pinned: a user's seed keeps its meaning across releases.
    np.testing.assert_allclose(expected[0, 0, :3], [-0.950509, -0.711955, -0.427374], rtol=1e-5)


def test_a_token_keeps_its_noise_when_the_vocabulary_is_padded():
    keys = row_keys(jnp.uint32([[0, 7]]), jnp.int32([[3]]), Purpose.SAMPLE)
    np.testing.assert_array_equal(gumbel(keys, 12)[:, :, :7], gumbel(keys, 7))


@pytest.mark.parametrize("bits", [0, 1, 2**31, 2**32 - 129, 2**32 - 1])
def test_noise_is_finite_at_the_ends(bits, monkeypatch):
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.full(shape, bits, dtype))
    keys = row_keys(jnp.uint32([[0, 7]]), jnp.int32([[3]]), Purpose.SAMPLE)
    expected = min((bits + 0.5) / 2**32, 1 - 2**-24)
    np.testing.assert_allclose(uniform(keys)[0, 0], expected, rtol=1e-6)
    assert 0 < uniform(keys)[0, 0] < 1
    np.testing.assert_allclose(gumbel(keys, 2)[0, 0], -math.log(-math.log1p(-expected)), rtol=1e-5, atol=1e-6)


def test_noise_has_the_right_law():
    """Kolmogorov's statistic over 2^20 draws; exceeded with probability 2 exp(-2 n d^2) < 1e-6."""
    draws = 2**20
    keys = row_keys(jnp.uint32([[0, 11]] * 8), jnp.tile(jnp.arange(8, dtype=jnp.int32)[None], (8, 1)), Purpose.ACCEPT)
    limit = math.sqrt(math.log(2e6) / (2 * draws))
    noise = np.sort(np.asarray(gumbel(keys, draws // 64), np.float64).ravel())
    assert np.abs(np.exp(-np.exp(-noise)) - (np.arange(draws) + 0.5) / draws).max() < limit


# The logits chain

OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-4, 0.05, 0.7, 1.0, 3.0, 1e30]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 5, 12, 13, 14, 2**31 - 1]),
        "top_p": st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
        "min_p": st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
    }
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    options=st.lists(OPTIONS, min_size=4, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-3, 1.0, 8.0, 1e4]),
    on_grid=st.booleans(),
)
def test_chain_equals_a_float64_reference(options, seed, scale, on_grid):
    rows = [SamplingParams(**row) for row in options]
    logits = np.random.default_rng(seed).normal(size=(4, 2, 13)) * scale
    # A coarse grid makes many ties.
    logits = (np.round(logits / scale * 2) * scale if on_grid else logits).astype(np.float32)
    got = np.asarray(jit_log_probs(logits, state(*rows)))
    for row, position in itertools.product(range(4), range(2)):
        check_log_probs(got[row, position], logits[row, position], rows[row])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=1), [0, 1]),
        (SamplingParams(top_k=2), [0, 1]),
        (SamplingParams(top_k=3), [0, 1, 2, 3]),
        (SamplingParams(top_k=99), [0, 1, 2, 3, 4]),
        (SamplingParams(top_p=1e-50), [0, 1]),
        (SamplingParams(top_p=0.25), [0, 1]),
        (SamplingParams(top_p=0.65), [0, 1, 2, 3]),
        (SamplingParams(top_p=0.97), [0, 1, 2, 3, 4]),
        (SamplingParams(min_p=1), [0, 1]),
        (SamplingParams(min_p=0.49), [0, 1, 2, 3]),
        (SamplingParams(min_p=1e-3), [0, 1, 2, 3, 4]),
        # min_p first: of what it leaves, the two largest are 2/3, so top_p = .66 needs no more.
        (SamplingParams(min_p=0.49, top_p=0.66), [0, 1]),
        (SamplingParams(top_p=0.66), [0, 1, 2, 3]),
    ],
)
def test_filters_keep_ties_and_the_most_likely_token(params, kept):
    logits = np.log(np.float32([[[0.32, 0.32, 0.16, 0.16, 0.04]]]))
    got = np.asarray(jit_log_probs(logits, state(params)))[0, 0]
    np.testing.assert_array_equal(np.flatnonzero(got > -np.inf), kept)
    np.testing.assert_allclose(np.exp(got).sum(), 1, rtol=1e-6)


def test_top_p_of_one_keeps_the_smallest_tokens_beside_rows_that_filter():
    logits = np.tile(np.float32([0] * 12 + [-60]), (2, 1, 1))
    got = np.asarray(jit_log_probs(logits, state(SamplingParams(top_p=1.0), SamplingParams(top_p=0.5)))).squeeze(1)
    assert np.isfinite(got[0]).all()


def test_greedy_rows_are_exactly_one_hot_whatever_the_filters():
    logits = np.float32([[[1, 3, 3, 2]]] * 3)
    rows = (SamplingParams(temperature=9.9e-6, top_k=3), SamplingParams(temperature=0, min_p=0.1), SamplingParams())
    one_hot = [-np.inf, 0, -np.inf, -np.inf]
    for params in (rows[:2], rows):
        got = np.asarray(jit_log_probs(logits[: len(params)], state(*params)))
        np.testing.assert_array_equal(got[:2, 0], [one_hot, one_hot])
    assert np.isfinite(got[2]).all()
    # The limit itself is not greedy, in float32 as in float64.
    assert not state(SamplingParams(temperature=1e-5)).is_greedy[0]


def test_extreme_logits_and_temperatures_stay_finite():
    """Field cases i10 and c3, and logits near the largest float32."""
    logits = np.float32([[[50, -50, -50]]] * 2)
    got = np.asarray(jit_log_probs(logits, state(SamplingParams(temperature=1e-8), SamplingParams(temperature=1e-4))))
    np.testing.assert_array_equal(got[0, 0], [0, -np.inf, -np.inf])
    np.testing.assert_allclose(got[1, 0], [0, -1e6, -1e6], rtol=1e-6)
    got = np.asarray(jit_log_probs(np.float32([[[-20, 42, -20]]]), state(SamplingParams(temperature=1e-3))))
    np.testing.assert_allclose(got[0, 0], [-62000, 0, -62000], rtol=1e-6)
    huge = np.float32([[[3e38, -3e38, 3e38]]])
    got = np.asarray(jit_log_probs(huge, state(SamplingParams(temperature=1e-5, top_p=0.9, top_k=2))))
    np.testing.assert_allclose(np.exp(got[0, 0]), [0.5, 0, 0.5], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_stay_in_their_row(bad):
    params = SamplingParams(top_k=3, top_p=0.9, min_p=0.01)
    logits = np.random.default_rng(0).normal(size=(3, 2, 7)).astype(np.float32)
    sampling = state(params, params, SamplingParams(temperature=0))
    positions = jnp.zeros((3, 2), jnp.int32)
    clean = jit_log_probs(logits, sampling)
    broken = logits.copy()
    broken[0] = bad
    got = jit_log_probs(broken, sampling)
    np.testing.assert_array_equal(got[1:], clean[1:])
    tokens = jit_sample(got, sampling, positions)
    np.testing.assert_array_equal(tokens[1:], jit_sample(clean, sampling, positions)[1:])
    assert ((tokens >= 0) & (tokens < 7)).all()


def test_argmax_takes_the_first_of_ties_and_survives_nan():
    x = jnp.float32([[1, 5, 5], [np.nan, 1, 2], [-np.inf] * 3, [np.inf, np.inf, 0]])
    got = np.asarray(argmax(x))
    np.testing.assert_array_equal(got[[0, 2, 3]], [1, 0, 0])
    assert 0 <= got[1] < 3


def test_all_greedy_batches_skip_exponentials_noise_and_filters():
    """What is outside the conditionals runs for every batch: nothing there may touch the vocabulary."""
    sampling, logits = state(SamplingParams()), jnp.zeros((1, 2, 5))
    for function, args in (
        (log_probs, (logits, sampling)),
        (sample, (logits, sampling, jnp.zeros((1, 2), jnp.int32))),
    ):
        equations = jax.make_jaxpr(function)(*args).eqns
        assert {e.primitive.name for e in equations} <= {"lt", "reduce_and", "convert_element_type", "cond"}
        greedy_branch = next(e for e in equations if e.primitive.name == "cond").params["branches"][1]
        assert not {"exp", "while", "random_bits", "cond"} & {e.primitive.name for e in greedy_branch.eqns}


# The plain draw


def test_seeded_draws_do_not_depend_on_the_batch():
    """Field case c7: seed 7 alone, as row 5 of 8 among other parameters, and one position at a time."""
    logits = np.random.default_rng(1).normal(size=(8, 20, 50)).astype(np.float32)
    others = [SamplingParams(temperature=0), SamplingParams(top_p=0.8), SamplingParams(top_k=4)]
    params = [SamplingParams()] * 8
    params[:3] = others
    positions = jnp.tile(jnp.arange(30, 50, dtype=jnp.int32)[None], (8, 1))

    def draw(rows, columns=slice(None)):
        sampling = state(*(params[row] for row in rows), seeds=[100 + row if row != 5 else 7 for row in rows])
        log_p = jit_log_probs(logits[rows, columns], sampling)
        return np.asarray(jit_sample(log_p, sampling, positions[: len(rows), columns]))

    alone = draw([5])[0]
    np.testing.assert_array_equal(draw(list(range(8)))[5], alone)
    np.testing.assert_array_equal(draw([5], slice(11, 12))[0], alone[11:12])


def test_seeds_differ_and_do_not_cycle():
    """Field case i7: equal logits, T = 1. A false failure needs a repeated run of 100 of 16 tokens: < 1e-100."""
    sampling = state(SamplingParams(), SamplingParams(), seeds=[1, 2])
    positions = jnp.tile(jnp.arange(200, dtype=jnp.int32)[None], (2, 1))
    tokens = np.asarray(jit_sample(jnp.zeros((2, 200, 16)), sampling, positions))
    assert (tokens[0] != tokens[1]).any()
    for period in range(1, 101):
        assert (tokens[:, period:] != tokens[:, :-period]).any(axis=1).all()


# The end of an output


def commit_one_by_one(tokens, num_emitted, stops, room):
    """The definition: emit, test stop, then test length."""
    for count in range(num_emitted + 1):
        if count and tokens[count - 1] in stops:
            return count, True, False
        if count == room:
            return count, False, True
    return num_emitted, False, False


def test_stop_and_limit_equal_committing_one_by_one():
    cases = list(itertools.product(itertools.product(range(3), repeat=3), range(4), [(), (2,), (0, 2)], range(5)))
    stop_ids = np.int32([(*stops, -1, -1)[:2] for _, _, stops, _ in cases])
    tokens, emitted, room = (np.array([case[i] for case in cases], np.int32) for i in (0, 1, 3))
    got = jax.jit(stop_and_limit)(tokens, emitted, stop_ids, room)
    expected = [commit_one_by_one(*case) for case in cases]
    for got_field, expected_field in zip(got, zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(got_field, expected_field)


@pytest.mark.parametrize(
    ("stop", "emitted", "room", "expected"),
    [
        (12, 6, 5, (3, True, False)),
        (15, 6, 5, (5, False, True)),
        (14, 6, 5, (5, True, False)),
        (12, 2, 5, (2, False, False)),
        (99, 4, 3, (3, False, True)),
        (10, 4, 0, (0, False, True)),
    ],
)
def test_stop_comes_before_length(stop, emitted, room, expected):
    """Field cases d1 and d6: drafts 10..15 are right; stop at 12, or 15 lies beyond the limit of 5."""
    tokens = jnp.arange(10, 16, dtype=jnp.int32)[None]
    got = stop_and_limit(tokens, jnp.int32([emitted]), jnp.int32([[stop, -1]]), jnp.int32([room]))
    assert tuple(field.item() for field in got) == expected


def test_exactly_max_tokens_are_committed():
    """Field case d6: K = 3, always right, max_tokens 1..9."""
    for max_tokens in range(1, 10):
        committed = 0
        while committed < max_tokens:
            tokens = jnp.arange(4, dtype=jnp.int32)[None]
            room = jnp.int32([max_tokens - committed])
            count, _, at_limit = stop_and_limit(tokens, jnp.int32([4]), jnp.int32([[-1]]), room)
            committed += int(count[0])
            assert bool(at_limit[0]) == (committed == max_tokens)
        assert committed == max_tokens
