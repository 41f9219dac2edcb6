"""The page table and the capacity ledger: exact vectors, then random histories."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import rnd_config
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxspec.cache import Capacity, KVCache, PageTable
from jaxspec.cache import capacity as ledger_ops
from jaxspec.cache.kv_cache import bytes_per_token
from jaxspec.cache.page_table import grow, shrink, slots_of, table_faults
from jaxspec.config import ModelConfig

PAGE_SIZE = 4


def i32(*values):
    return jnp.array(values, jnp.int32)


def make_ledger(capacity, pages=200, columns=150, page_size=PAGE_SIZE):
    """Rows at rest with these capacities."""
    rows = len(capacity)
    ledger = (Capacity.create(rows), PageTable.create(rows, columns, pages, page_size))
    ledger, ok = ledger_ops.reserve(ledger, i32(*capacity), columns * page_size)
    assert bool(ok.all())
    return ledger


def every(ledger):
    return jnp.ones(ledger[0].capacity.shape, bool)


def broken(faults):
    return [law for law, is_broken in faults.items() if bool(is_broken)]


class TestVectors:
    """The numbers of TensorRT-LLM's capacity tests (facts, section 3A)."""

    def test_grant_and_settle(self):
        ledger, ok = ledger_ops.grant(make_ledger([100]), jnp.array([True]), 3)
        assert ok.tolist() == [True]
        assert ledger[0].capacity.tolist() == [107]
        ledger = ledger_ops.settle(ledger, every(ledger), i32(1), i32(103), 3)
        assert ledger[0].capacity.tolist() == [102]

    def test_four_rounds_of_two_accepted_grow_by_three_each(self):
        ledger = make_ledger([100])
        for step in range(1, 5):
            ledger, _ = ledger_ops.grant(ledger, every(ledger), 3)
            ledger = ledger_ops.settle(ledger, every(ledger), i32(2), i32(101 + 3 * step), 3)
            assert ledger[0].capacity.tolist() == [100 + 3 * step]

    def test_revert(self):
        ledger, _ = ledger_ops.grant(make_ledger([100]), jnp.array([True]), 2)
        assert ledger[0].capacity.tolist() == [105]
        ledger = ledger_ops.revert(ledger, every(ledger), 2)
        assert ledger[0].capacity.tolist() == [100]
        assert ledger_ops.revert(ledger, every(ledger), 2)[0].capacity.tolist() == [100], "no grant, no effect"

    def test_grant_of_four(self):
        assert ledger_ops.grant(make_ledger([128]), jnp.array([True]), 4)[0][0].capacity.tolist() == [137]

    def test_top_up(self):
        ledger, _ = ledger_ops.grant(make_ledger([100]), jnp.array([True]), 1)
        assert ledger[0].capacity.tolist() == [103]
        ledger, ok = ledger_ops.top_up(ledger, every(ledger), 1, 3)
        assert (ledger[0].capacity.tolist(), ok.tolist()) == ([107], [True])
        assert (ledger[0].granted_drafts.tolist(), ledger[0].slack.tolist()) == ([3], [3])
        assert ledger_ops.settle(ledger, every(ledger), i32(0), i32(102), 3)[0].capacity.tolist() == [101]

    def test_floor(self):
        capacity, table = make_ledger([100])
        granted = capacity.replace(granted_drafts=i32(0), slack=i32(5))
        settled = ledger_ops.settle((granted, table), jnp.array([True]), i32(0), i32(100), 2)
        assert settled[0].capacity.tolist() == [99]

    def test_no_drafts_no_slack(self):
        ledger, _ = ledger_ops.grant(make_ledger([100]), jnp.array([True]), 0)
        assert (ledger[0].capacity.tolist(), ledger[0].slack.tolist()) == ([101], [0])
        assert ledger_ops.settle(ledger, every(ledger), i32(0), i32(102), 0)[0].capacity.tolist() == [101]

    def test_settle_uses_the_recorded_draft_length(self):
        ledger, _ = ledger_ops.grant(make_ledger([100]), jnp.array([True]), 2)
        assert ledger_ops.settle(ledger, every(ledger), i32(0), i32(102), 5)[0].capacity.tolist() == [101]

    def test_release_once(self):
        ledger = make_ledger([100, 9])
        rows = jnp.array([True, False])
        first = ledger_ops.release(ledger, rows)
        again = ledger_ops.release(first, rows)
        assert first[1].num_free == again[1].num_free == 199 - 3
        assert broken(ledger_ops.ledger_faults(again, i32(0, 9))) == []


def test_a_row_that_cannot_grow_stalls_and_records_nothing():
    ledger = make_ledger([8, 8, 8], pages=9)  # 6 of 8 pages held
    ledger, ok = ledger_ops.grant(ledger, every(ledger), 2)  # each wants 2 more
    assert ok.tolist() == [True, False, False]
    assert ledger[0].granted_drafts.tolist() == [2, -1, -1]
    assert ledger[0].capacity.tolist() == [13, 8, 8]
    assert broken(table_faults(ledger[1])) == []


def test_a_row_that_wants_less_does_not_wait_for_one_that_wants_more():
    ledger = make_ledger([8, 7], pages=6)  # 4 of 5 pages held
    ledger, ok = ledger_ops.grant(ledger, every(ledger), 2)  # they want 2 more and 1 more
    assert ok.tolist() == [False, True]
    assert ledger[0].capacity.tolist() == [8, 12]


def test_rows_that_need_no_page_run_though_the_pool_is_dry():
    ledger = make_ledger([8, 9], pages=6)
    ledger, ok = ledger_ops.grant(ledger, every(ledger), 1)
    assert ok.tolist() == [False, True]
    assert ledger[1].num_free == 0


def test_slots_outside_the_row_are_scratch():
    table = make_ledger([6])[1]
    positions = jnp.array([[0, 5, 7, 8, -1, 10**6]], jnp.int32)
    slots = slots_of(table, positions, jnp.ones_like(positions, bool))
    pages = table.page_ids[0]
    expected = [int(pages[0]) * 4, int(pages[1]) * 4 + 1, int(pages[1]) * 4 + 3, 0, 0, 0]
    assert slots.tolist() == [expected]
    assert slots_of(table, positions, jnp.zeros_like(positions, bool)).tolist() == [[0] * 6]


def test_schedule_and_cancel_holds_nothing():
    """Field case a8: a step scheduled and cancelled 50 times."""
    ledger = make_ledger([10])
    held = int(ledger[1].num_pages[0])
    for _ in range(50):
        ledger, _ = ledger_ops.grant(ledger, every(ledger), 3)
        ledger = ledger_ops.revert(ledger, every(ledger), 3)
    assert int(ledger[1].num_pages[0]) == held


def test_all_rejected_never_holds_more_than_its_bound():
    """Field case a2: 200 tokens, none accepted; growth by 1 + K without reclaim would leak K a round."""
    ledger = make_ledger([5], pages=60)
    num_drafts, most = 3, 0
    for kv_len in range(5, 205):
        ledger, ok = ledger_ops.grant(ledger, every(ledger), num_drafts)
        assert bool(ok[0])
        most = max(most, int(ledger[1].num_pages[0]))
        ledger = ledger_ops.settle(ledger, every(ledger), i32(0), i32(kv_len + 2), num_drafts)
    assert most <= -(-(5 + 200 + 2 * num_drafts + 1) // PAGE_SIZE)


def test_page_zero_and_a_pool_without_pages_are_refused():
    with pytest.raises(ValueError, match="got 1 pages"):
        PageTable.create(1, 4, 1, PAGE_SIZE)
    assert 0 not in np.asarray(PageTable.create(1, 4, 5, PAGE_SIZE).free_ids)[:4]


def test_faults_are_seen():
    table = make_ledger([8])[1]
    twice = table.replace(page_ids=table.page_ids.at[0, 1].set(table.page_ids[0, 0]))
    assert broken(table_faults(twice)) == ["a page is lost or has two owners"]
    scratch = table.replace(page_ids=table.page_ids.at[0, 1].set(0))
    assert "the scratch page is owned or free" in broken(table_faults(scratch))
    stale = table.replace(page_ids=table.page_ids.at[0, 2].set(7))
    assert broken(table_faults(stale)) == ["an unallocated column names a page"]


def test_pools_share_one_budget():
    """Field case a7: three main layers and one MTP layer, equal token capacity, 3 to 1."""
    config = ModelConfig.from_hf(rnd_config())
    cache = KVCache.create(config, 10, PAGE_SIZE, jnp.float32)
    total = cache.latent.nbytes + cache.rope.nbytes
    assert total == 10 * PAGE_SIZE * bytes_per_token(config, jnp.float32)
    assert (config.num_layers, config.num_mtp_layers, cache.latent.shape[0]) == (3, 1, 4)


def test_huge_pool_slots_do_not_overflow():
    """Field case i2: page ids times the page stride pass 2**31; slots are page and offset, never elements."""
    pages, width = 58_300, 576
    table = PageTable.create(1, 2, pages, 64).replace(page_ids=i32(58_290, 0)[None], num_pages=i32(1))
    slot = slots_of(table, i32(63)[None], jnp.array([[True]]))
    assert int(slot[0, 0]) == 58_290 * 64 + 63
    pool = jnp.zeros((1, pages, 64, width), jnp.int8)
    pool = jax.jit(lambda p, s: p.at[0, s // 64, s % 64].set(7), donate_argnums=0)(pool, slot)
    assert int(pool[0, 58_290, 63, 575]) == 7
    assert int(jnp.sum(pool[0, 0])) == 0


ROWS, COLUMNS, PAGES, MAX_DRAFTS = 3, 12, 20, 3


@functools.partial(jax.jit, static_argnames=("name", "statics"))
def run(name, statics, ledger, *arguments):
    return getattr(ledger_ops, name)(ledger, *arguments, *statics)


class Ledger(RuleBasedStateMachine):
    """Random grant / top-up / settle / revert / release against a model in plain Python."""

    @initialize()
    def start(self):
        self.ledger = (Capacity.create(ROWS), PageTable.create(ROWS, COLUMNS, PAGES, PAGE_SIZE))
        self.kv_len, self.granted = [0] * ROWS, [None] * ROWS

    def mask(self, row):
        return jnp.arange(ROWS) == row

    @rule(row=st.integers(0, ROWS - 1), tokens=st.integers(1, 20))
    def admit(self, row, tokens):
        if self.kv_len[row] or self.granted[row] is not None:
            return
        target = jnp.where(self.mask(row), tokens, 0).astype(jnp.int32)
        free = int(self.ledger[1].num_free)
        self.ledger, ok = run("reserve", (20,), self.ledger, target)
        assert bool(ok[row]) == (-(-tokens // PAGE_SIZE) <= free)
        self.kv_len[row] = tokens if bool(ok[row]) else 0

    @rule(rows=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS), drafts=st.integers(0, MAX_DRAFTS))
    def grant(self, rows, drafts):
        fits = [n + 1 + 2 * MAX_DRAFTS <= COLUMNS * PAGE_SIZE for n in self.kv_len]
        rows = [
            r and n > 0 and g is None and f for r, n, g, f in zip(rows, self.kv_len, self.granted, fits, strict=True)
        ]
        before = self.ledger[0].capacity.tolist()
        self.ledger, ok = run("grant", (drafts,), self.ledger, jnp.array(rows))
        for row in range(ROWS):
            if bool(ok[row]):
                self.granted[row] = drafts
            else:
                assert self.ledger[0].capacity.tolist()[row] == before[row]

    @precondition(lambda self: any(g is not None for g in self.granted))
    @rule(drafts=st.integers(0, MAX_DRAFTS), more=st.integers(0, MAX_DRAFTS))
    def top_up(self, drafts, more):
        if more <= drafts:
            return
        rows = jnp.array([g == drafts for g in self.granted])
        self.ledger, ok = run("top_up", (drafts, more), self.ledger, rows)
        self.granted = [more if bool(o) else g for o, g in zip(ok, self.granted, strict=True)]

    @rule(row=st.integers(0, ROWS - 1), share=st.floats(0, 1))
    def settle(self, row, share):
        granted = self.granted[row]
        accepted = 0 if granted is None else round(share * granted)
        if granted is not None:
            self.kv_len[row] += 1 + accepted
            self.granted[row] = None
        accepted_rows = jnp.where(self.mask(row), accepted, 0).astype(jnp.int32)
        committed = i32(*self.kv_len) + 1
        self.ledger = run("settle", (MAX_DRAFTS,), self.ledger, self.mask(row), accepted_rows, committed)

    @rule(row=st.integers(0, ROWS - 1))
    def revert(self, row):
        self.ledger = run("revert", (MAX_DRAFTS,), self.ledger, self.mask(row))
        self.granted[row] = None

    @rule(row=st.integers(0, ROWS - 1))
    def release(self, row):
        self.ledger = run("release", (), self.ledger, self.mask(row))
        self.kv_len[row], self.granted[row] = 0, None

    @invariant()
    def laws_hold(self):
        if not hasattr(self, "ledger"):
            return
        assert broken(ledger_ops.ledger_faults(self.ledger, i32(*self.kv_len))) == []
        for row, (kv_len, granted) in enumerate(zip(self.kv_len, self.granted, strict=True)):
            bound = -(-(kv_len + (0 if granted is None else 1 + 2 * granted)) // PAGE_SIZE)
            assert int(self.ledger[1].num_pages[row]) <= bound


TestLedger = Ledger.TestCase
TestLedger.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_grow_and_shrink_are_inverse(width):
    table = PageTable.create(2, 8, 12, PAGE_SIZE)
    grown, ok = grow(table, i32(width, 1), width)
    assert ok.tolist() == [True, True]
    back = shrink(grown, i32(0, 0), width)
    assert back.num_free == table.num_free
    assert broken(table_faults(back)) == []
    assert sorted(np.asarray(back.free_ids)[:11].tolist()) == list(range(1, 12))
