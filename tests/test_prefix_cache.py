"""The host's index of the prefix cache: what is found, what is kept, and what goes first."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxspec.engine.prefix_cache import PrefixCache

PROMPT = list(range(100, 112))


def filled(token_ids=PROMPT, kv_len=None, page_size=4, num_handles=8, keyed_by_next=True):
    """A cache with the pages of one request, which has left; the pages are under the first handles."""
    cache = PrefixCache(page_size, num_handles, keyed_by_next)
    publish(cache, token_ids, kv_len)
    return cache


def publish(cache, token_ids, kv_len=None):
    """Runs a request from its start to its end."""
    match = cache.match(token_ids)
    published = cache.publish(token_ids, len(token_ids) - 1 if kv_len is None else kv_len, match)
    cache.release(match)
    return published


def found(cache, token_ids):
    """Tokens and handles that a request finds; it leaves at once."""
    match = cache.match(token_ids)
    cache.release(match)
    return match.num_tokens, match.handles


class TestMatch:
    def test_full_pages_and_the_token_after_them(self):
        cache = filled()  # pages 0 and 1 are followed by 104 and 108; page 2 is not full
        assert found(cache, PROMPT) == (8, [0, 1])
        assert found(cache, [*PROMPT[:10], 1, 2, 3]) == (8, [0, 1])
        assert found(cache, [*PROMPT[:4], 1, *PROMPT[5:]]) == (3, [0])

    def test_without_mtp_the_token_after_does_not_matter(self):
        cache = filled(keyed_by_next=False)
        assert found(cache, [*PROMPT[:8], 1, 2]) == (8, [0, 1])
        assert found(cache, [*PROMPT[:4], 1, 2]) == (4, [0])

    def test_another_token_after_a_page_loses_its_last_position_only(self):
        cache = filled()
        assert found(cache, [*PROMPT[:8], 1, 2]) == (7, [0, 1])
        assert publish(cache, [*PROMPT[:8], 1, 2]) == {1: 2}, "the same page for another token after it"
        assert found(cache, [*PROMPT[:8], 1, 2]) == (8, [0, 2])
        assert found(cache, PROMPT) == (8, [0, 1])

    @pytest.mark.parametrize("keyed_by_next", [False, True])
    @pytest.mark.parametrize(
        ("length", "expected"), [(1, 0), (3, 0), (4, 3), (5, 4), (7, 4), (8, 7), (9, 8), (11, 8)]
    )
    def test_the_last_token_is_never_taken_over(self, keyed_by_next, length, expected):
        cache = filled(keyed_by_next=keyed_by_next)
        assert found(cache, PROMPT[:length])[0] == expected

    def test_a_page_counts_only_behind_the_same_pages(self):
        cache = filled()
        assert found(cache, [1, 2, 3, 4, *PROMPT[4:]]) == (0, [])
        assert found(cache, PROMPT[4:]) == (0, [])

    @pytest.mark.parametrize(("keyed_by_next", "expected"), [(True, [0]), (False, [0, 1])])
    def test_pages_of_one_token(self, keyed_by_next, expected):
        cache = filled([7, 8, 9], page_size=1, keyed_by_next=keyed_by_next)
        assert found(cache, [7, 8, 1]) == (len(expected), expected)
        assert found(cache, [7, 8]) == (1, [0])

    def test_negative_and_large_tokens_are_told_apart(self):
        cache = filled([255, 256, 65536, 0, 1], num_handles=2)
        assert found(cache, [255, 256, 65536, 0, 1]) == (4, [0])
        assert found(cache, [255, 256, 0, 0, 1]) == (0, [])


class TestPublish:
    def test_only_full_pages_are_published_as_they_fill(self):
        cache = PrefixCache(4, 8, True)
        match = cache.match(PROMPT)
        columns = [cache.publish(PROMPT, kv_len, match) for kv_len in (0, 3, 4, 7, 9, 11)]
        assert columns == [{}, {}, {0: 0}, {}, {1: 1}, {}]
        assert cache.publish([*PROMPT, 1], 12, match) == {2: 2}

    def test_what_is_there_already_is_skipped(self):
        cache = filled()
        assert publish(cache, PROMPT) == {}
        assert publish(cache, [*PROMPT, 1]) == {2: 2}
        assert cache.num_entries == 3

    def test_two_requests_with_the_same_tokens_publish_them_once(self):
        cache = PrefixCache(4, 8, True)
        one, two = cache.match(PROMPT), cache.match(PROMPT)
        assert cache.publish(PROMPT, 11, one) == {0: 0, 1: 1}
        assert cache.publish(PROMPT, 11, two) == {}
        cache.release(one)
        assert cache.num_idle == 2, "the other one's row has pages of its own"

    def test_unknown_tokens_are_refused(self):
        cache = PrefixCache(4, 8, True)
        with pytest.raises(ValueError, match="kv_len: got 12, expected fewer than the 12 tokens"):
            cache.publish(PROMPT, 12, cache.match(PROMPT))

    def test_without_a_free_handle_fewer_pages_are_published_and_the_rest_later(self):
        cache = PrefixCache(4, 3, True)
        running = cache.match(PROMPT)
        cache.publish(PROMPT, 11, running)
        other, token_ids = cache.match(list(range(13))), list(range(13))
        assert cache.publish(token_ids, 12, other) == {0: 2}
        cache.release(running)
        assert cache.publish(token_ids, 12, other) == {}
        assert cache.evict(3) == [1, 0]
        assert cache.publish(token_ids, 12, other) == {1: 0, 2: 1}
        assert cache.evict(3) == []


class TestEviction:
    def test_tails_go_first(self):
        cache = filled([*PROMPT, 1])
        assert cache.evict(2) == [2, 1]
        assert found(cache, PROMPT) == (4, [0])
        assert cache.evict(5) == [0]
        assert (cache.num_entries, cache.evict(1)) == (0, [])

    def test_the_least_recently_used_goes_first(self):
        cache = filled(PROMPT[:5])
        publish(cache, [1, 2, 3, 4, 5])
        found(cache, PROMPT[:5])
        assert cache.evict(1) == [1]

    def test_use_in_part_counts_as_use(self):
        cache = filled(PROMPT[:5])
        publish(cache, [1, 2, 3, 4, 5])
        assert found(cache, PROMPT[:4]) == (3, [0])
        assert cache.evict(1) == [1]

    def test_what_is_to_be_copied_is_not_kept(self):
        """A request alone in a pool of its size needs every page but its own."""
        cache = filled()
        match = cache.match(PROMPT[:8])
        assert (match.num_tokens, match.handles, cache.num_idle) == (7, [0, 1], 1)
        assert cache.evict(2) == [1]

    def test_what_a_running_request_uses_stays(self):
        cache = filled()
        one, two = cache.match(PROMPT), cache.match(PROMPT[:6])
        assert (cache.num_idle, cache.evict(9)) == (0, [])
        cache.release(one)
        cache.release(one)
        assert (cache.num_idle, cache.evict(9)) == (1, [1])
        cache.release(two)
        assert cache.evict(9) == [0]

    def test_handles_are_used_again(self):
        cache = filled(num_handles=2)
        assert cache.evict(2) == [1, 0]
        assert sorted(publish(cache, PROMPT).values()) == [0, 1]


class TestReset:
    def test_everything_is_forgotten(self):
        cache = filled()
        assert sorted(cache.reset()) == [0, 1]
        assert (cache.num_entries, cache.num_idle, found(cache, PROMPT)) == (0, 0, (0, []))

    def test_running_requests_leave_in_peace_and_bring_nothing_back(self):
        cache = PrefixCache(4, 4, True)
        running = cache.match(PROMPT)
        cache.publish(PROMPT, 4, running)
        assert cache.reset() == [0]
        assert cache.publish(PROMPT, 11, running) == {}
        publish(cache, PROMPT)
        cache.release(running)
        assert (cache.num_entries, cache.num_idle) == (2, 2)
        assert sorted(cache.evict(9)) == [0, 1]


NUM_HANDLES = 4
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=8)
SOME = st.integers(0, 9)


class Index(RuleBasedStateMachine):
    """Random requests against a list of everything published: (tokens up to the page's end, the one after)."""

    @initialize(page_size=st.integers(1, 3), keyed=st.booleans(), first=TOKENS)
    def start(self, page_size, keyed, first):
        self.size, self.keyed, self.clock = page_size, keyed, 0
        self.cache = PrefixCache(page_size, NUM_HANDLES, keyed)
        self.handles, self.used = {}, {}  # by key; when it was last used
        self.running = []  # tokens, pages dealt with, keys in use, match
        self.match(first)
        self.enter(self.running[0], len(first) - 1)

    def key(self, token_ids, pages):
        end = pages * self.size
        return tuple(token_ids[:end]), token_ids[end] if self.keyed else None

    def use(self, key):
        self.clock += 1
        self.used[key] = self.clock

    def idle(self):
        """The unused, the oldest first."""
        busy = {key for request in self.running for key in request[2]}
        return sorted(set(self.handles) - busy, key=self.used.get)

    def forget(self, count):
        return [self.handles.pop(key) for key in self.idle()[:count]]

    # One rule, since hypothesis leaves out some of several, and what is rare here needs all of them.
    @rule(action=st.sampled_from(["start", "start", "publish", "end", "evict", "reset"]), tokens=TOKENS, some=SOME)
    def act(self, action, tokens, some):
        if action == "start":
            self.match(tokens)
        elif action == "evict":
            expected = self.forget(some % 3)
            assert self.cache.evict(some % 3) == expected
        elif action == "reset" and some == 9:
            self.reset()
        elif self.running:
            request = self.running[some % len(self.running)]
            if action == "publish":
                request[0] = request[0] + tokens
                self.enter(request, len(request[0]) - 1 - some % 3)
            else:
                self.release(request)

    def match(self, token_ids):
        match = self.cache.match(token_ids)
        whole = [n for n in range(1, len(token_ids)) if n * self.size < len(token_ids)]
        pages = next((n - 1 for n in whole if self.key(token_ids, n) not in self.handles), len(whole))
        keys = [self.key(token_ids, n + 1) for n in range(pages)]
        assert match.handles[:pages] == [self.handles[key] for key in keys]
        end = (pages + 1) * self.size
        alike = {self.handles[k]: k for k in self.handles if len(token_ids) >= end and k[0] == tuple(token_ids[:end])}
        in_part = bool(alike) and self.size > 1
        assert match.num_tokens == (end - 1 if in_part else pages * self.size) < len(token_ids)
        assert len(match.handles) == pages + in_part
        if in_part:
            self.use(alike[match.handles[-1]])
        self.running.append([token_ids, pages, keys, match])

    def enter(self, request, kv_len):
        token_ids = request[0]
        published = self.cache.publish(token_ids, kv_len, request[3])
        columns = {}
        while (request[1] + 1) * self.size <= kv_len:
            key = self.key(token_ids, request[1] + 1)
            if key not in self.handles:
                if len(self.handles) == NUM_HANDLES:
                    break
                handle = published[request[1]]
                assert handle not in self.handles.values()
                self.handles[key] = columns[request[1]] = handle
                request[2].append(key)
            request[1] += 1
        assert published == columns

    def release(self, request):
        self.running = [other for other in self.running if other is not request]
        self.cache.release(request[3])
        for key in reversed(request[2]):
            self.use(key)

    def reset(self):
        assert sorted(self.cache.reset()) == sorted(self.handles.values())
        self.handles = {}
        for request in self.running:
            self.cache.release(request[3])
        self.running = []

    @invariant()
    def counts(self):
        if hasattr(self, "cache"):
            assert self.cache.num_entries == len(self.handles) <= NUM_HANDLES
            assert self.cache.num_idle == len(self.idle())
            assert all(0 <= handle < NUM_HANDLES for handle in self.handles.values())


TestIndex = Index.TestCase
TestIndex.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
