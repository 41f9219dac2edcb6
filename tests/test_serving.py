"""The engine's rows: requests of any length come and leave while others decode, whatever the host knows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import SOFT_NOISE, write_cyc, write_rnd
from harness import cached
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from jaxspec import SamplingParams, SpeculativeConfig
from jaxspec.checkpoint import load
from jaxspec.decoding import Finish
from jaxspec.engine import Engine, EngineConfig, Metrics
from jaxspec.engine.requests import make_request

OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "page_size": 4,
    "num_pages": 73,
    "max_num_batched_tokens": 16,
    "num_stop_ids": 16,
    "rounds_per_dispatch": 1,
    "debug": True,
}


def counting(prompt, num_new):
    """CYC's greedy text."""
    return [(prompt[-1] + i) % 64 for i in range(1, num_new + 1)]


def greedy(max_tokens):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("serving")
    folders = {drafts: write_cyc(root / drafts, drafts, SOFT_NOISE) for drafts in ("hit", "mix", "miss")}
    return {name: load(folder) for name, folder in (folders | {"rnd": write_rnd(root / "rnd")}).items()}


@pytest.fixture(scope="module")
def engine(models):
    @functools.cache
    def make(drafts="mix", num_drafts=3, schedule=None, **options):
        config, params = models[drafts]
        spec = SpeculativeConfig(num_speculative_tokens=num_drafts, draft_len_schedule=schedule)
        return Engine(params, config, spec, EngineConfig(**OPTIONS | options), jnp.float32)

    return make


def add(engine, request_id, prompt, params):
    options = engine.options
    request = make_request(prompt, params, engine.config, None, options.max_model_len, options.num_stop_ids)
    engine.add_request(request_id, request, params.seed)


def drain(engine):
    """The requests that end from here on, by id."""
    ended = {}
    while engine.has_unfinished_requests:
        ended |= {live.request_id: live for live in engine.step() if live.ended}
    return ended


def generate(engine, prompts, params):
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        add(engine, str(i), prompt, param)
    ended = drain(engine)
    return [ended[str(i)] for i in range(len(prompts))]


def requests(count, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, count)
    prompts = [rng.integers(0, 64, n).tolist() for n in sizes]
    return prompts, [greedy(int(rng.integers(1, 64 - n))) for n in sizes]


def assert_counted(lives, prompts, params):
    for live, prompt, param in zip(lives, prompts, params, strict=True):
        assert live.token_ids == counting(prompt, param.max_tokens)
        assert live.finish == Finish.LENGTH


def assert_pages_home(engine):
    engine.reset_prefix_cache()
    engine.check_integrity()
    table, pages = engine._device.serving.state.table, engine._device.num_pages
    assert sorted(table.free_ids.tolist()[: int(table.num_free)]) == list(range(1, pages))


# --- Whatever the host knows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", ["hit", "mix", "miss"])
@pytest.mark.parametrize(("overlap", "rounds"), [(0, 1), (1, 1), (2, 3)])
def test_more_requests_than_rows(engine, drafts, overlap, rounds):
    """Every request gets the tokens it would get alone, and every law holds after every program."""
    served = engine(drafts, overlap=overlap, rounds_per_dispatch=rounds)
    prompts, params = requests(13)
    assert_counted(generate(served, prompts, params), prompts, params)
    assert_pages_home(served)


@pytest.mark.parametrize("drafts", ["hit", "mix", "miss"])
def test_as_many_drafts_are_accepted_as_without_overlap(engine, drafts):
    """Field case b1: what is prepared before the accepted count is read uses the count on the device."""
    prompts, params = requests(8, seed=4)
    accepted = []
    for overlap, rounds in ((0, 1), (1, 1), (2, 3)):
        served = engine(drafts, overlap=overlap, rounds_per_dispatch=rounds)
        served.reset_prefix_cache()
        lives = generate(served, prompts, params)
        accepted.append([live.metrics.num_accepted_tokens_per_pos for live in lives])
    assert accepted == [accepted[0]] * 3


def test_no_drafts(engine):
    served = engine(num_drafts=0)
    prompts, params = requests(6, seed=1)
    assert_counted(generate(served, prompts, params), prompts, params)


def test_long_prompts_do_not_hold_up_rows_that_decode(engine):
    served = engine("miss", overlap=0)
    add(served, "short", [5], greedy(40))
    served.step()
    add(served, "long", list(range(48)), greedy(1))
    live, before = served._known["short"], []
    while "long" in served._known:
        before.append(len(live.token_ids))
        served.step()
    # Three chunks of 16 tokens, and a token of the other request beside each.
    assert len(before) >= 3
    assert np.all(np.diff(before) > 0)
    served.abort_request("short")


def test_chunks_leave_the_caches_as_a_whole_prompt_does(engine):
    """Field case f6: at a chunk's edge the draft layer takes the prompt's next token."""
    whole, chunks = (engine("rnd", overlap=0, chunk_buckets=((1, width),)) for width in (64, 4))
    for prompt in (LONG, LONG[:10], LONG[:8]):
        found = []
        for served in (whole, chunks):
            served.reset_prefix_cache()
            found.append(after_rounds(served, prompt))
        assert found[0][1] == found[1][1]
        np.testing.assert_allclose(found[0][0], found[1][0], atol=2e-5)


def test_steady_state_transfers_nothing_but_reports(engine):
    served = engine("mix")
    prompts, params = requests(4, seed=2)
    generate(served, prompts, params)
    for i, prompt in enumerate(prompts):
        add(served, str(i), prompt, greedy(10))
    with jax.transfer_guard("disallow"):
        while served.has_unfinished_requests:
            served.step()


def test_a_second_pass_compiles_nothing(engine):
    served = engine("hit", overlap=1, rounds_per_dispatch=1)
    prompts, params = requests(9, seed=3)
    generate(served, prompts, params)
    programs = len(served._device._programs)
    seconds = served.metrics.seconds_compile
    generate(served, prompts, params)
    assert len(served._device._programs) == programs
    assert served.metrics.seconds_compile == seconds


# --- A pool that is too small -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_preempted_requests_start_again_and_give_the_same(engine, overlap):
    served = engine("mix", overlap=overlap, num_pages=25)
    prompts, params = [[i, i + 1] for i in range(8)], [greedy(60)] * 8
    assert_counted(generate(served, prompts, params), prompts, params)
    assert served.metrics.num_preemptions > 0
    assert_pages_home(served)


def test_two_prompts_that_fill_the_pool(engine):
    """Field case f9: seven pages, of which nobody's drafts find one. And what could never fit is refused."""
    served = engine("mix", max_model_len=22, num_pages=8)
    prompts, params = [list(range(16)), list(range(30, 42))], [greedy(4)] * 2
    assert_counted(generate(served, prompts, params), prompts, params)
    with pytest.raises(ValueError, match="got 40 tokens, expected fewer than max_model_len 22"):
        add(served, "long", list(range(40)), greedy(4))
    with pytest.raises(ValueError, match="max_tokens: got 7 after a prompt of 16, expected at most 6"):
        add(served, "long", list(range(16)), greedy(7))
    assert not served.has_unfinished_requests


def poisoned(serving):
    """NaN in scratch and in every page that nobody holds."""
    free = (serving.state.table.num_refs == 0)[None, :, None, None]
    cache = jax.tree.map(lambda pool: jnp.where(free, jnp.nan, pool), serving.state.cache)
    return serving.replace(state=serving.state.replace(cache=cache))


@pytest.mark.parametrize("drafts", ["hit", "mix", "miss"])
def test_nan_in_pages_that_nobody_holds_changes_nothing(engine, drafts):
    """Field case a1, with rows that pad a bucket, shared pages, evictions and preemptions."""
    served = engine(drafts, overlap=1, num_pages=25)
    prompts = [[i, *LONG[: 4 * (i % 4)], i] for i in range(10)]
    params = [greedy(40)] * 10
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        add(served, i, prompt, param)
    ended = {}
    while served.has_unfinished_requests:
        served._device._serving = poisoned(served._device.serving)
        ended |= {live.request_id: live for live in served.step() if live.ended}
    assert_counted([ended[i] for i in range(10)], prompts, params)


def test_sampled_output_survives_preemption(engine):
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=50) for i in range(6)]
    prompts = [[i, 2 * i] for i in range(6)]
    alone = [generate(engine("mix"), [p], [q])[0].token_ids for p, q in zip(prompts, params, strict=True)]
    small = engine("mix", num_pages=25)
    before = small.metrics.num_preemptions
    assert [live.token_ids for live in generate(small, prompts, params)] == alone
    assert small.metrics.num_preemptions > before


# --- Requests come and go -----------------------------------------------------------------------------------------


def test_requests_are_added_and_aborted_at_any_time(engine):
    served = engine("mix")
    add(served, "a", [1, 2, 3], greedy(30))
    served.step()
    add(served, "b", [9], greedy(5))
    served.step()
    served.abort_request("a")
    add(served, "a", [40], greedy(7))
    ended = {request_id: live.token_ids for request_id, live in drain(served).items()}
    assert ended == {"a": counting([40], 7), "b": counting([9], 5)}
    assert_pages_home(served)


def test_ids_must_be_new_and_known(engine):
    served = engine("mix")
    add(served, "a", [1], greedy(2))
    with pytest.raises(ValueError, match="'a': got it twice"):
        add(served, "a", [1], greedy(2))
    with pytest.raises(ValueError, match="'b': got none such"):
        served.abort_request("b")
    with pytest.raises(ValueError, match="the prompt leaves no room for output"):
        add(served, "c", [1] * 64, greedy(2))
    with pytest.raises(
        ValueError, match="stop_token_ids: got 17 with the model's own, expected at most num_stop_ids = 16"
    ):
        add(served, "d", [1], SamplingParams(stop_token_ids=list(range(17))))
    assert drain(served).keys() == {"a"}


def test_a_pool_smaller_than_a_request_is_refused(engine):
    with pytest.raises(ValueError, match="num_pages: got 18, expected at least 19: one request of max_model_len 64"):
        engine("mix", num_pages=18)


def test_a_step_that_fails_takes_only_the_running_requests_with_it(engine, monkeypatch):
    served = engine("mix", overlap=1)
    for i in range(6):
        add(served, str(i), [i], greedy(12))
    served.step()

    def fails(*_):
        raise RuntimeError("no such device")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_collect", fails)
        with pytest.raises(RuntimeError, match="no such device"):
            served.step()
    ended = drain(served)
    assert {i for i, live in ended.items() if live.error == "a step failed: no such device"} == set("0123")
    assert {i: ended[i].token_ids for i in "45"} == {i: counting([int(i)], 12) for i in "45"}
    assert_pages_home(served)


# --- Prefix cache -------------------------------------------------------------------------------------------------

LONG = [(7 * i) % 64 for i in range(21)]


def hits(live):
    return live.metrics.prefix_cache_hits


def test_prompts_that_begin_alike_share_pages(engine):
    """21 tokens in pages of 4: five full ones, of which a prompt that goes on otherwise recomputes one position."""
    served = engine("mix")
    served.reset_prefix_cache()
    first, *_ = generate(served, [LONG], [greedy(9)])
    same, other, short = generate(served, [LONG, [*LONG[:20], 1, 2], LONG[:20]], [greedy(9)] * 3)
    assert [hits(live) for live in (first, same, other, short)] == [0, 20, 19, 19]
    assert first.token_ids == same.token_ids == counting(LONG, 9)
    assert other.token_ids == counting([2], 9)
    assert short.token_ids == counting([LONG[19]], 9)
    assert_pages_home(served)


def test_the_output_is_cached_too_and_nothing_rejected_is(engine):
    """A second turn: prompt and output of the first, and more. The last token of the first turn was never cached."""
    served = engine("mix")
    served.reset_prefix_cache()
    [first] = generate(served, [[5]], [greedy(24)])
    [second] = generate(served, [[5, *first.token_ids, 40]], [greedy(24)])
    assert hits(second) == 24
    assert second.token_ids == counting([40], 24)


def after_rounds(served, prompt):
    """What the caches of all layers hold of a request after four rounds, and its tokens so far."""
    add(served, "cached", prompt, greedy(20))
    while not served._known["cached"].decoding:
        served.step()
    for _ in range(3):
        served.step()
    live = served._known["cached"]
    state = served._device.serving.state
    found = cached(state, live.row, int(state.kv_len[live.row])), list(live.token_ids), hits(live)
    served.abort_request("cached")
    return found


@pytest.mark.parametrize("prompt", [LONG, [*LONG[:20], 1], LONG[:20], LONG[:16], [*LONG[:18], 3, 4]])
def test_what_is_found_equals_what_would_be_computed(engine, prompt):
    """In the draft layer too, whose entry at a page's end depends on the token after the page."""
    plain, served = (engine("rnd", overlap=0, enable_prefix_caching=on) for on in (False, True))
    expected, tokens, _ = after_rounds(plain, prompt)
    served.reset_prefix_cache()
    generate(served, [LONG], [greedy(20)])
    found, same, num_hits = after_rounds(served, prompt)
    assert num_hits >= 4 * ((len(prompt) - 1) // 4) - 1
    assert same == tokens
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_pages_of_past_requests_give_way_to_running_ones(engine):
    """The least recently used go first, and none is missing to a request that needs the whole pool."""
    served = engine("mix", num_pages=25)
    served.reset_prefix_cache()
    for start in range(8):
        prompt = [start, 9] * 10
        [live] = generate(served, [prompt], [greedy(40)])
        assert live.token_ids == counting(prompt, 40)
        assert live.metrics.num_stalls == 0
    assert_pages_home(served)


def test_a_preempted_request_finds_its_pages_again(engine):
    served = engine("mix", overlap=1, num_pages=25)
    served.reset_prefix_cache()
    prompts, params = [[i, i + 1] for i in range(8)], [greedy(60)] * 8
    lives = generate(served, prompts, params)
    assert_counted(lives, prompts, params)
    assert sum(hits(live) for live in lives if live.metrics.num_preemptions) > 0


def test_without_a_prefix_cache_nothing_is_found(engine):
    served = engine("mix", enable_prefix_caching=False)
    for _ in range(2):
        [live] = generate(served, [LONG], [greedy(9)])
        assert (live.metrics.prefix_cache_hits, live.token_ids) == (0, counting(LONG, 9))
        assert live.metrics.prefix_cache_queries == 0
    assert_pages_home(served)


# --- Draft length -------------------------------------------------------------------------------------------------


def test_the_draft_length_follows_the_batch(models):
    """Three rows draft one token, one row three. Acceptance is full again as soon as drafts are back."""
    config, params = models["hit"]
    spec = SpeculativeConfig(num_speculative_tokens=3, draft_len_schedule={1: 3, 3: 1})
    served = Engine(params, config, spec, EngineConfig(**OPTIONS), jnp.float32)
    prompts, wanted = [[i] for i in range(4)], [greedy(n) for n in (50, 20, 30, 10)]
    lives = generate(served, prompts, wanted)
    assert_counted(lives, prompts, wanted)
    metrics = served.metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0
    per_round = lives[0].metrics.num_draft_tokens / lives[0].metrics.num_drafts
    assert 1 < per_round < 3


def test_requests_may_draft_less_or_not_at_all(engine):
    served = engine("hit")
    wants = [None, 0, 1, 3]
    params = [SamplingParams(temperature=0.0, max_tokens=17, num_speculative_tokens=n) for n in wants]
    lives = generate(served, [[7]] * 4, params)
    assert_counted(lives, [[7]] * 4, params)
    assert [live.metrics.num_draft_tokens / max(live.metrics.num_drafts, 1) for live in lives] == [3, 0, 1, 3]


def test_drafting_that_does_not_pay_is_turned_off_for_good(models):
    config, params = models["miss"]
    gate = {"acceptance_rate_window_size": 20, "acceptance_rate_threshold": 0.5}
    spec = SpeculativeConfig(num_speculative_tokens=3, **gate)
    served = Engine(params, config, spec, EngineConfig(**OPTIONS), jnp.float32)
    prompts, wanted = [[i] for i in range(6)], [greedy(20)] * 6
    assert_counted(generate(served, prompts, wanted), prompts, wanted)
    drafted = served.metrics.num_draft_tokens
    assert drafted > 0
    assert_counted(generate(served, prompts, wanted), prompts, wanted)
    assert served.metrics.num_draft_tokens == drafted


def test_warmup_compiles_all_there_is(models):
    config, params = models["hit"]
    gate = {"acceptance_rate_window_size": 3, "acceptance_rate_threshold": 1.0}
    spec = SpeculativeConfig(num_speculative_tokens=2, draft_len_schedule={1: 2, 4: 1}, **gate)
    served = Engine(params, config, spec, EngineConfig(**OPTIONS | {"num_pages": 25}), jnp.float32)
    served.warmup()
    programs, seconds = len(served._device._programs), served.metrics.seconds_compile
    assert seconds > 0
    prompts, wanted = requests(12, seed=5)
    assert_counted(generate(served, prompts, wanted), prompts, wanted)
    assert (len(served._device._programs), served.metrics.seconds_compile) == (programs, seconds)


# --- Any history --------------------------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """Adds, steps and aborts in any order, over a pool that holds a third of the rows.

    Prompts begin alike, so they find each other's pages. The draft length follows the batch, and some want less.
    """

    make = None

    @initialize(
        drafts=st.sampled_from(["hit", "mix", "miss"]), overlap=st.integers(0, 2), rounds=st.sampled_from([1, 3])
    )
    def start(self, drafts, overlap, rounds):
        schedule = ((1, 3), (2, 0), (3, 1), (4, 3))
        options = {"overlap": overlap, "rounds_per_dispatch": rounds, "num_pages": 20}
        self.served = type(self).make(drafts, schedule=schedule, **options)
        self.count, self.waiting = 0, {}

    @rule(
        stem=st.sampled_from([LONG[:12], LONG[:8], [9, *LONG[:11]], []]),
        tail=st.lists(st.integers(0, 63), min_size=1, max_size=8),
        more=st.integers(1, 44),
        drafts=st.sampled_from([None, None, 0, 1]),
    )
    def add(self, stem, tail, more, drafts):
        self.count += 1
        params = SamplingParams(temperature=0.0, max_tokens=more, num_speculative_tokens=drafts)
        add(self.served, str(self.count), [*stem, *tail], params)
        self.waiting[str(self.count)] = counting(tail, more)

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            for live in self.served.step():
                if live.ended:
                    assert live.token_ids == self.waiting.pop(live.request_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        self.served.abort_request(request_id)
        del self.waiting[request_id]

    @rule()
    def reset_prefix_cache(self):
        self.served.reset_prefix_cache()

    def teardown(self):
        if hasattr(self, "served"):
            while self.served.has_unfinished_requests:
                self.step(1)
            assert not self.waiting
            assert_pages_home(self.served)


def test_any_history(engine, monkeypatch):
    monkeypatch.setattr(Histories, "make", staticmethod(engine))
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    schedule = ((1, 3), (2, 0), (3, 1), (4, 3))
    served = [
        engine(drafts, schedule=schedule, overlap=overlap, rounds_per_dispatch=rounds, num_pages=20)
        for drafts in ("hit", "mix", "miss")
        for overlap in range(3)
        for rounds in (1, 3)
    ]
    total = sum((one.metrics for one in served), Metrics())
    assert total.num_steps > 2000
    assert total.num_preemptions > 20
    assert total.prefix_cache_hits > 1000


def test_a_thousand_requests_of_all_lengths(models):
    """Lengths with a heavy tail, 16 rows, and pages for a third of them."""
    config, params = models["mix"]
    options = {"max_model_len": 256, "max_num_seqs": 16, "page_size": 8, "num_pages": 16 * 33 // 3 + 1}
    options |= {"max_num_batched_tokens": 64, "row_buckets": (), "chunk_buckets": ((4, 16),)}
    served = Engine(params, config, SpeculativeConfig(num_speculative_tokens=3), EngineConfig(**options), jnp.float32)
    rng = np.random.default_rng(0)
    sizes = np.minimum(1 + rng.pareto(0.9, (1000, 2)) * 20, 127).astype(int).tolist()
    stems = rng.integers(0, 64, (4, 128)).tolist()
    prompts = [[*stems[i % 4][: size - 1], i % 64] for i, (size, _) in enumerate(sizes)]
    wanted = [greedy(more) for _, more in sizes]
    for i, (prompt, param) in enumerate(zip(prompts, wanted, strict=True)):
        add(served, i, prompt, param)
    ended = {}
    while served.has_unfinished_requests:
        ended |= {live.request_id: live for live in served.step() if live.ended}
        if served.metrics.num_steps % 16 == 0:
            served.check_integrity()
    assert_counted([ended[i] for i in range(1000)], prompts, wanted)
    assert served.metrics.num_preemptions > 0
    assert served.metrics.prefix_cache_hits > 0
    assert_pages_home(served)
