"""TensorRT-LLM's failures at their size: tables of 131,070-token prompts in pages of 256, K = 3.

Ledger, table and round are the library's own; the model is a toy that accepts by rote and looks at the slots it is
given, as kernels would. Field cases a1 and a2, and TensorRT-LLM's pull request 16280.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxspec import KVCache, SamplingParams, SamplingState, SpeculativeConfig, init_state
from jaxspec.cache import capacity as ledger_ops
from jaxspec.cache.capacity import ledger_faults
from jaxspec.decoding import Finish
from jaxspec.decoding import round as round_module
from jaxspec.decoding.state import pages_per_row
from jaxspec.sampling.acceptance import Verdict

PAGE_SIZE, PROMPT, NUM_DRAFTS, ROUNDS = 256, 131_070, 3, 1_100
# Rows accept all three drafts in every fourth round and else none, and so take 1.75 tokens a round. With slack that
# is never given back a row grows by 4.75, and has outgrown its table of 526 pages after some 750 rounds.
MAX_MODEL_LEN = 526 * PAGE_SIZE - 2 * NUM_DRAFTS
SPEC = SpeculativeConfig(num_speculative_tokens=NUM_DRAFTS)
CONFIGURATIONS = [(group, batch) for group in (8, 16) for batch in (1, 2, 4)]


def prompts_cached(config, num_rows):
    """Rows whose prompts are cached, over a pool that holds them all."""
    columns = pages_per_row(MAX_MODEL_LEN, NUM_DRAFTS, PAGE_SIZE)
    shape = (1, num_rows * columns + 1, PAGE_SIZE, 1)
    sampling = SamplingState.stack([(SamplingParams(temperature=0.0), 0, ())] * num_rows, 1)
    cache = KVCache(jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16))
    state = init_state(config, SPEC, cache, sampling, MAX_MODEL_LEN)
    kv_len = jnp.full(num_rows, PROMPT, jnp.int32)
    ledger, _ = ledger_ops.reserve((state.capacity, state.table), kv_len, PROMPT)
    return state.replace(
        capacity=ledger[0],
        table=ledger[1],
        kv_len=kv_len,
        limit=jnp.full(num_rows, MAX_MODEL_LEN, jnp.int32),
        finish=jnp.full(num_rows, Finish.RUNNING, jnp.int32),
        drafts=state.drafts.replace(count=jnp.full(num_rows, NUM_DRAFTS, jnp.int32)),
        drafter={"rounds": jnp.arange(num_rows, dtype=jnp.int32), "astray": jnp.bool_(False)},
    )


def toy_verify(params, config, spec, state, drafts, window, rows):
    """Accepts by rote. `astray`: a slot of the round is not in a page of its row."""
    num_rows = window.shape[0]
    accepted = jnp.minimum(jnp.where(state.drafter["rounds"] % 4 == 3, NUM_DRAFTS, 0), drafts.count)
    astray = state.drafter["astray"] | jnp.any(rows[:, None] & (window < PAGE_SIZE))
    state = state.replace(drafter={"rounds": state.drafter["rounds"] + 1, "astray": astray})
    hidden = jnp.zeros((num_rows, 1 + NUM_DRAFTS, 1))
    tokens = jnp.ones((num_rows, 1 + NUM_DRAFTS), jnp.int32)
    return state, hidden, Verdict(tokens, accepted), jnp.ones(num_rows, bool)


def toy_draft(params, config, spec, state, verified, rows, num_drafts):
    count = jnp.clip(state.limit - state.kv_len - 2, 0, num_drafts)
    return state.replace(drafts=state.drafts.replace(count=count))


def run(model, num_rows):
    """All rounds in one program. Returns the state, and by round: went astray, some row stalled, a law is broken."""
    _, config, params = model

    def step(state, _):
        state, info = round_module.decode_round(params, config, SPEC, state)
        held = jnp.where(state.running, state.kv_len, 0)
        broken = jnp.any(jnp.stack(list(ledger_faults((state.capacity, state.table), held).values())))
        return state, (state.drafter["astray"], jnp.any(info.stalled), broken)

    return jax.jit(lambda state: jax.lax.scan(step, state, None, length=ROUNDS))(prompts_cached(config, num_rows))


@pytest.fixture
def toy(checkpoints, monkeypatch):
    """Any model will do, for nobody looks at it."""
    monkeypatch.setattr(round_module, "_verify", toy_verify)
    monkeypatch.setattr(round_module, "_draft", toy_draft)
    return checkpoints["rnd"]


@pytest.mark.parametrize(("group", "batch"), CONFIGURATIONS)
def test_more_than_a_thousand_rounds_stay_within_the_table(toy, group, batch):
    state, (astray, stalled, broken) = run(toy, group * batch)
    assert not astray.any()
    assert not stalled.any()
    assert not broken.any()
    assert state.running.all()
    bound = -(-(state.kv_len + 1 + 2 * NUM_DRAFTS) // PAGE_SIZE)
    assert (state.table.num_pages <= bound).all()
    assert (state.kv_len == PROMPT + 1.75 * ROUNDS).all()


@pytest.mark.parametrize(("group", "batch"), CONFIGURATIONS)
def test_slack_that_is_not_given_back_outgrows_the_table(toy, monkeypatch, group, batch):
    real = ledger_ops.settle

    def leaky(ledger, rows, num_accepted, committed, num_drafts):
        capacity, table = ledger
        kept = capacity.replace(slack=jnp.zeros_like(capacity.slack))
        return real((kept, table), rows, num_accepted, committed, num_drafts)

    monkeypatch.setattr(ledger_ops, "settle", leaky)
    _, (_, stalled, broken) = run(toy, group * batch)
    assert broken[0], "the law sees it at once"
    # Before that, nothing is to be seen from outside.
    assert abs(int(stalled.argmax()) - 757) < 10


def test_growth_by_1_plus_k_reaches_beyond_the_last_page(toy, monkeypatch):
    """When depends on what is accepted: at a page's edge, the device reaches an entry that is not filled."""
    real = ledger_ops.grant

    def short(ledger, rows, num_drafts):
        ledger, ok = real(ledger, rows, num_drafts)
        less = jnp.where(ok, ledger[0].capacity - num_drafts, ledger[0].capacity)
        table = ledger_ops.shrink(ledger[1], ledger[1].pages_for(less), 2)
        return (ledger[0].replace(capacity=less), table), ok

    monkeypatch.setattr(ledger_ops, "grant", short)
    _, (astray, _, _) = run(toy, 8)
    assert 0 < int(astray.argmax()) < 200


def test_lengths_of_a_host_that_hopes_reach_beyond_the_last_page(toy, monkeypatch):
    """The host takes all drafts for accepted, and prepares the next round from there."""
    real = round_module._window

    def hopeful(state, start, rows, width):
        return real(state, start + NUM_DRAFTS, rows, width)

    monkeypatch.setattr(round_module, "_window", hopeful)
    _, (astray, _, _) = run(toy, 8)
    assert 0 < int(astray.argmax()) < 200
