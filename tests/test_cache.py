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

from jaxspec.cache import Capacity, KVCache, PageTable, PublishedPages, prefix
from jaxspec.cache import capacity as ledger_ops
from jaxspec.cache.kv_cache import bytes_per_token, copy_page
from jaxspec.cache.page_table import drop, grow, shrink, slots_of, table_faults
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


def on_columns(table, handles):
    """One handle for each column: those given, and none for the others."""
    none = jnp.iinfo(jnp.int32).max
    return i32(*(handles.get(column, none) for column in range(table.page_ids.shape[1])))


def share(tokens, rows=3, pages=20):
    """A row with pages for so many tokens, the full ones under handles 0, 1, ...; the others are empty."""
    capacity, table = make_ledger([tokens] + [0] * (rows - 1), pages=pages, columns=6)
    handles = on_columns(table, {column: column for column in range(tokens // PAGE_SIZE)})
    table, published = prefix.publish(table, PublishedPages.create(8), jnp.int32(0), handles)
    return (capacity, table), published


def adopt(ledger, published, row, num_tokens, handles=range(6)):
    handles = on_columns(ledger[1], dict(enumerate(handles)))
    ledger, *numbers = prefix.adopt(ledger, published, jnp.int32(row), handles, jnp.int32(num_tokens))
    return ledger, [int(n) for n in numbers]


def no_faults(ledger, published, kv_len):
    return broken(ledger_ops.ledger_faults(ledger, i32(*kv_len), prefix.held_pages(ledger[1], published))) == []


class TestSharedPages:
    """Publish, adopt, withdraw and release; a pool of 19 pages of 4 tokens."""

    def test_publish_adds_a_reference_and_ignores_columns_without_a_page(self):
        (capacity, table), published = share(10)
        pages = table.page_ids[0]
        assert published.page_ids.tolist() == [int(pages[0]), int(pages[1])] + [0] * 6
        assert table.num_refs[pages[:3]].tolist() == [2, 2, 1]
        table, published = prefix.publish(table, published, jnp.int32(0), on_columns(table, {3: 5, 2: 8}))
        assert published.page_ids.tolist() == [int(pages[0]), int(pages[1])] + [0] * 6
        assert no_faults((capacity, table), published, [10, 0, 0])

    def test_whole_pages_are_adopted_without_a_copy(self):
        ledger, published = share(10)
        free = int(ledger[1].num_free)
        ledger, numbers = adopt(ledger, published, 1, 8)
        assert numbers == [8, 0, 0]
        assert ledger[1].page_ids[1].tolist() == [*ledger[1].page_ids[0, :2].tolist(), 0, 0, 0, 0]
        assert (ledger[0].capacity.tolist(), ledger[1].num_pages.tolist()) == ([10, 8, 0], [3, 2, 0])
        assert int(ledger[1].num_free) == free
        assert no_faults(ledger, published, [10, 8, 0])

    def test_a_row_that_goes_on_within_a_page_gets_its_own(self):
        ledger, published = share(10)
        first, second = ledger[1].page_ids[0, :2].tolist()
        free = int(ledger[1].num_free)
        ledger, (num_tokens, source, target) = adopt(ledger, published, 1, 7)
        assert (num_tokens, source) == (7, second)
        assert target not in (0, *ledger[1].page_ids[0].tolist())
        assert ledger[1].page_ids[1, :3].tolist() == [first, target, 0]
        assert ledger[1].num_refs[i32(first, second, target)].tolist() == [3, 2, 1]
        assert int(ledger[1].num_free) == free - 1
        assert no_faults(ledger, published, [10, 7, 0])

    def test_without_a_page_for_the_copy_the_last_one_is_left_out(self):
        ledger, published = share(10, pages=4)
        ledger, numbers = adopt(ledger, published, 1, 7)
        assert numbers == [4, 0, 0]
        assert no_faults(ledger, published, [10, 4, 0])

    @pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (3, 3), (4, 4), (7, 4), (8, 4), (24, 4)])
    def test_a_handle_without_a_page_ends_the_prefix(self, num_tokens, expected):
        ledger, published = share(10)
        ledger, numbers = adopt(ledger, published, 1, num_tokens, handles=[1, 5, 0])
        assert numbers[0] == expected
        assert no_faults(ledger, published, [10, expected, 0])

    def test_a_full_row_is_adopted(self):
        ledger, published = share(24)
        ledger, numbers = adopt(ledger, published, 1, 24)
        ledger, others = adopt(ledger, published, 2, 23)
        assert (numbers, others[0]) == ([24, 0, 0], 23)
        assert no_faults(ledger, published, [24, 24, 23])

    def test_pages_outlive_their_rows_and_come_home_once(self):
        ledger, published = share(10)
        ledger, _ = adopt(ledger, published, 1, 8)
        ledger, _ = adopt(ledger, published, 2, 8)
        ledger = ledger_ops.release(ledger, jnp.array([True, True, False]))
        assert (int(ledger[1].num_free), ledger[1].page_ids[:2].any()) == (17, False)
        assert no_faults(ledger, published, [0, 0, 8])
        table, published = prefix.withdraw(ledger[1], published, jnp.arange(8) < 2)
        assert (int(table.num_free), published.page_ids.any()) == (17, False)
        ledger = ledger_ops.release((ledger[0], table), jnp.array([True, True, True]))
        assert int(ledger[1].num_free) == 19
        assert no_faults(ledger, published, [0, 0, 0])

    def test_rows_that_share_a_page_free_it_once_in_one_call(self):
        ledger, published = share(10)
        ledger, _ = adopt(ledger, published, 1, 8)
        ledger = (ledger[0], prefix.withdraw(ledger[1], published, jnp.ones(8, bool))[0])
        ledger = ledger_ops.release(ledger, jnp.array([True, True, False]))
        assert sorted(ledger[1].free_ids[: int(ledger[1].num_free)].tolist()) == list(range(1, 20))

    def test_only_references_that_are_lost_free_a_page(self):
        table = PageTable.create(1, 4, 5, PAGE_SIZE)
        dropped = drop(table, jnp.zeros(5, jnp.int32))
        assert int(dropped.num_free) == 4, "pages that are free already are not freed again"

    def test_a_row_grows_and_shrinks_behind_shared_pages(self):
        ledger, published = share(8)
        ledger, _ = adopt(ledger, published, 1, 8)
        ledger, ok = ledger_ops.grant(ledger, jnp.array([True, True, False]), 3)
        assert ok.tolist() == [True, True, False]
        assert broken(ledger_ops.ledger_faults(ledger, i32(8, 8, 0), prefix.held_pages(ledger[1], published))) == []
        ledger = ledger_ops.revert(ledger, jnp.array([True, True, False]), 3)
        assert no_faults(ledger, published, [8, 8, 0])

    def test_nothing_waits_for_the_host(self):
        ledger, published = share(10)
        handles, row, count = on_columns(ledger[1], {0: 0, 1: 1}), jnp.int32(1), jnp.int32(7)
        rows, which = jnp.ones(3, bool), jnp.ones(8, bool)
        programs = [jax.jit(f) for f in (prefix.adopt, ledger_ops.release, prefix.withdraw, prefix.publish)]
        with jax.transfer_guard("disallow"):
            ledger, *_ = programs[0](ledger, published, row, handles, count)
            ledger = programs[1](ledger, rows)
            table, published = programs[2](ledger[1], published, which)
            programs[3](table, published, row, handles)

    def test_what_does_not_fit_the_table_is_refused(self):
        ledger, published = share(10)
        with pytest.raises(ValueError, match="handles: got 1, expected 6"):
            prefix.publish(ledger[1], published, jnp.int32(0), i32(3))
        with pytest.raises(ValueError, match="handles: got 7, expected 6"):
            prefix.adopt(ledger, published, jnp.int32(1), i32(*range(7)), jnp.int32(3))
        with pytest.raises(ValueError, match="num_handles: got 0"):
            PublishedPages.create(0)


def test_a_page_is_copied_in_all_layers():
    shape = (2, 4, PAGE_SIZE, 3)
    pool = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    cache = KVCache(latent=pool, rope=-pool)
    copied = jax.jit(copy_page)(cache, jnp.int32(1), jnp.int32(3))
    for got, before in ((copied.latent, pool), (copied.rope, -pool)):
        expected = np.array(before)
        expected[:, 3] = expected[:, 1]
        np.testing.assert_array_equal(got, expected)
    nothing = copy_page(cache, jnp.int32(0), jnp.int32(0))
    np.testing.assert_array_equal(nothing.latent, pool)


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


LOST, TWICE = "a page is lost or its references are miscounted", "a row names a page twice"
FREE, WRITES = "a page is free twice, or free and held", "a row may write to a page that others hold"


def test_faults_are_seen():
    table = make_ledger([8])[1]
    twice = table.replace(page_ids=table.page_ids.at[0, 1].set(table.page_ids[0, 0]))
    assert broken(table_faults(twice)) == [LOST, TWICE]
    scratch = table.replace(page_ids=table.page_ids.at[0, 1].set(0))
    assert broken(table_faults(scratch)) == [LOST, "the scratch page is owned or free"]
    stale = table.replace(page_ids=table.page_ids.at[0, 2].set(7))
    assert broken(table_faults(stale)) == ["an unallocated column names a page"]
    miscounted = table.replace(num_refs=table.num_refs.at[table.page_ids[0, 0]].set(2))
    assert broken(table_faults(miscounted)) == [LOST]
    assert broken(table_faults(miscounted, table.references(table.page_ids[0, :1]))) == [], "a handle holds it too"
    lost = table.replace(num_free=table.num_free - 1)
    assert broken(table_faults(lost)) == [LOST]
    free_twice = table.replace(free_ids=table.free_ids.at[0].set(table.free_ids[1]))
    assert broken(table_faults(free_twice)) == [LOST, FREE]
    place = int(table.num_free)
    held = table.replace(free_ids=table.free_ids.at[place].set(table.page_ids[0, 0]), num_free=table.num_free + 1)
    assert broken(table_faults(held)) == [FREE]
    assert broken(table_faults(table.replace(num_pages=i32(-1))))[-1] == "a count is out of range"


def test_a_shared_page_within_reach_of_a_write_is_seen():
    capacity, table = make_ledger([8])
    published = PublishedPages.create(4)
    table, published = prefix.publish(table, published, jnp.int32(0), on_columns(table, {1: 3}))
    held = prefix.held_pages(table, published)
    for kv_len, expected in ((8, []), (7, [WRITES]), (4, [WRITES]), (3, [WRITES])):
        faults = ledger_ops.ledger_faults((capacity.replace(capacity=i32(kv_len)), table), i32(kv_len), held)
        assert [law for law in broken(faults) if law == WRITES] == expected


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


ROWS, COLUMNS, PAGES, MAX_DRAFTS, HANDLES = 3, 12, 20, 3, 8


@functools.partial(jax.jit, static_argnames=("name", "statics"))
def run(name, statics, ledger, *arguments):
    return getattr(ledger_ops, name)(ledger, *arguments, *statics)


PUBLISH, WITHDRAW, ADOPT, FAULTS = (
    jax.jit(f) for f in (prefix.publish, prefix.withdraw, prefix.adopt, ledger_ops.ledger_faults)
)


class Ledger(RuleBasedStateMachine):
    """Random grant / top-up / settle / revert / release / publish / adopt / withdraw against a model in plain Python:
    a list of pages, any objects, for each row, and the page under each handle.
    """

    @initialize(tokens=st.integers(1, 20))
    def start(self, tokens):
        self.ledger = (Capacity.create(ROWS), PageTable.create(ROWS, COLUMNS, PAGES, PAGE_SIZE))
        self.published = PublishedPages.create(HANDLES)
        self.kv_len, self.granted = [0] * ROWS, [None] * ROWS
        self.pages, self.under = [[] for _ in range(ROWS)], {}
        self.admit(0, tokens)
        self.resize()
        self.publish(0, range(COLUMNS), HANDLES)

    def num_free(self):
        return PAGES - 1 - len({*(page for pages in self.pages for page in pages), *self.under.values()})

    def capacity(self, row):
        granted = self.granted[row]
        return self.kv_len[row] + (0 if granted is None else 1 + 2 * granted)

    def resize(self):
        """Rows hold the pages of their capacities; new ones are nobody else's."""
        for row, pages in enumerate(self.pages):
            wanted = -(-self.capacity(row) // PAGE_SIZE)
            self.pages[row] = pages[:wanted] + [object() for _ in range(wanted - len(pages))]

    def mask(self, row):
        return jnp.arange(ROWS) == row

    @rule(row=st.integers(0, ROWS - 1), tokens=st.integers(1, 20))
    def admit(self, row, tokens):
        if self.kv_len[row] or self.granted[row] is not None:
            return
        target = jnp.where(self.mask(row), tokens, 0).astype(jnp.int32)
        free = self.num_free()
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

    @rule(rows=st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2)]))
    def release(self, rows):
        self.ledger = run("release", (), self.ledger, jnp.array([row in rows for row in range(ROWS)]))
        for row in rows:
            self.kv_len[row], self.granted[row], self.pages[row] = 0, None, []

    @rule(row=st.integers(0, ROWS - 1), columns=st.permutations(range(COLUMNS)), count=st.integers(1, HANDLES))
    def publish(self, row, columns, count):
        unused = [h for h in range(HANDLES) if h not in self.under]
        full, held = self.kv_len[row] // PAGE_SIZE, len(self.pages[row])
        # Columns without a page come last, and are to be ignored.
        columns = [c for c in columns if c < full] + [c for c in columns if c >= held]
        handles = dict(zip(columns[:count], unused, strict=False))
        table, self.published = PUBLISH(
            self.ledger[1], self.published, jnp.int32(row), on_columns(self.ledger[1], handles)
        )
        self.ledger = (self.ledger[0], table)
        self.under |= {handle: self.pages[row][column] for column, handle in handles.items() if column < full}

    @rule(which=st.sets(st.integers(0, HANDLES - 1), min_size=1, max_size=3))
    def withdraw(self, which):
        which = [handle in which for handle in range(HANDLES)]
        table, self.published = WITHDRAW(self.ledger[1], self.published, jnp.array(which))
        self.ledger = (self.ledger[0], table)
        self.under = {handle: page for handle, page in self.under.items() if not which[handle]}

    @rule(row=st.integers(0, ROWS - 1), handles=st.permutations(range(HANDLES)), tokens=st.integers(0, 6 * PAGE_SIZE))
    def adopt(self, row, handles, tokens):
        self.release((row,))
        # A prefix has no page twice; pages under two handles are told apart by the first, and the others come last.
        first = {self.under.get(handle, handle): handle for handle in reversed(handles)}
        handles = [h for h in handles if first[self.under.get(h, h)] == h and (h in self.under or h == 0)]
        named = next((n for n, h in enumerate(handles) if h not in self.under), len(handles))
        tokens_left = min(tokens, named * PAGE_SIZE)
        copies = tokens_left % PAGE_SIZE > 0 and self.num_free() > 0
        expected = tokens_left if copies else tokens_left // PAGE_SIZE * PAGE_SIZE
        self.ledger, num_tokens, source, target = ADOPT(
            self.ledger,
            self.published,
            jnp.int32(row),
            on_columns(self.ledger[1], dict(enumerate(handles))),
            jnp.int32(tokens),
        )
        assert (int(num_tokens), int(source) > 0, int(target) > 0) == (expected, copies, copies)
        full = expected // PAGE_SIZE
        self.kv_len[row], self.pages[row] = expected, [self.under[h] for h in handles[:full]]
        if copies:
            assert int(source) == int(self.published.page_ids[handles[full]])
            assert int(target) == int(self.ledger[1].page_ids[row, full])

    @invariant()
    def laws_hold(self):
        if not hasattr(self, "ledger"):
            return
        self.resize()
        capacity, table = self.ledger
        held = prefix.held_pages(table, self.published)
        assert broken(FAULTS(self.ledger, i32(*self.kv_len), held)) == []
        assert capacity.capacity.tolist() == [self.capacity(row) for row in range(ROWS)]
        assert int(table.num_free) == self.num_free()
        # The pages of the model and the ids of the device are one to one.
        ids, under = table.page_ids.tolist(), self.published.page_ids.tolist()
        pairs = [
            (page, ids[row][column]) for row, pages in enumerate(self.pages) for column, page in enumerate(pages)
        ]
        pairs += [(page, under[handle]) for handle, page in self.under.items()]
        assert len(set(pairs)) == len({page for page, _ in pairs}) == len({i for _, i in pairs})
        assert table.num_pages.tolist() == [len(pages) for pages in self.pages]
        assert {handle for handle, page in enumerate(under) if page} == set(self.under)


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
