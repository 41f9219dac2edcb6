"""The engine's rows: requests of any length come and leave while others decode, whatever the host knows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import SOFT_NOISE, write_cyc
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from jaxspec import SamplingParams, SpeculativeConfig
from jaxspec.checkpoint import load
from jaxspec.decoding import Finish
from jaxspec.engine import Engine, EngineConfig
from jaxspec.engine.requests import make_request

OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "page_size": 4,
    "num_pages": 73,
    "max_num_batched_tokens": 16,
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
    return {drafts: load(write_cyc(root / drafts, drafts, SOFT_NOISE)) for drafts in ("hit", "mix", "miss")}


@pytest.fixture(scope="module")
def engine(models):
    @functools.cache
    def make(drafts="mix", num_drafts=3, **options):
        config, params = models[drafts]
        spec = SpeculativeConfig(num_speculative_tokens=num_drafts)
        return Engine(params, config, spec, EngineConfig(**OPTIONS | options), jnp.float32)

    return make


def add(engine, request_id, prompt, params):
    request = make_request(prompt, params, engine.config, None, engine.options.max_model_len)
    engine.add_request(request_id, request, params.seed)


def drain(engine):
    """The requests that end from here on, by id."""
    ended = {}
    while engine.has_unfinished_requests:
        ended |= {live.request_id: live for live in engine.step()}
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
    table, pages = engine._serving.state.table, engine.options.num_pages
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
    programs = len(served._programs)
    seconds = served.metrics.seconds_compile
    generate(served, prompts, params)
    assert len(served._programs) == programs
    assert served.metrics.seconds_compile == seconds


# --- A pool that is too small -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_preempted_requests_start_again_and_give_the_same(engine, overlap):
    served = engine("mix", overlap=overlap, num_pages=25)
    prompts, params = [[i, i + 1] for i in range(8)], [greedy(60)] * 8
    assert_counted(generate(served, prompts, params), prompts, params)
    assert served.metrics.num_preemptions > 0
    assert_pages_home(served)


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
    with pytest.raises(ValueError, match="stop_token_ids: got 17 with the model's own, expected at most 16"):
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


# --- Any history --------------------------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """Adds, steps and aborts in any order, over a pool that holds a third of the rows."""

    make = None

    @initialize(
        drafts=st.sampled_from(["hit", "mix", "miss"]), overlap=st.integers(0, 2), rounds=st.sampled_from([1, 3])
    )
    def start(self, drafts, overlap, rounds):
        self.served = type(self).make(drafts, overlap=overlap, rounds_per_dispatch=rounds, num_pages=25)
        self.count, self.waiting = 0, {}

    @rule(prompt=st.lists(st.integers(0, 63), min_size=1, max_size=40), more=st.integers(1, 24))
    def add(self, prompt, more):
        self.count += 1
        add(self.served, str(self.count), prompt, greedy(more))
        self.waiting[str(self.count)] = counting(prompt, more)

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            for live in self.served.step():
                assert live.token_ids == self.waiting.pop(live.request_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        self.served.abort_request(request_id)
        del self.waiting[request_id]

    def teardown(self):
        if hasattr(self, "served"):
            while self.served.has_unfinished_requests:
                self.step(1)
            assert not self.waiting
            if self.served._serving is not None:
                assert_pages_home(self.served)


def test_any_history(engine):
    Histories.make = staticmethod(engine)
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=30,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
