"""Which published pages hold which tokens: the host's index of the prefix cache.

A page is known by a digest of its tokens and of all before them. The MTP module's entry at a position also depends on
the token after it, so with MTP drafting a page counts as another one for another token after its last: there is an
entry for each. Of such a page, or of one that ends where the prompt does, all but the last position still serves.

vLLM's design (vllm/v1/core/kv_cache_manager.py, block_pool.py) but for the token after a page and for that last one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass
class Entry:
    """A published page.

    Attributes:
        digest: of its tokens and of all before them.
        next_token: the token after it, where that matters.
        handle: the device's name for it.
        num_users: running requests whose rows hold it.
    """

    digest: bytes
    next_token: int | None
    handle: int
    num_users: int = 0


@dataclasses.dataclass
class Match:
    """What a request has of the cache: the prefix found for it, and later what it publishes itself.

    Attributes:
        epoch: resets of the cache before it.
        handles: pages of the prefix, in order.
        num_tokens: tokens of the prefix. When they end within the last page, that one is to be copied: the request
            does not hold it, so adopt it before anything else is published.
        entries: those that the request uses, in the order of their columns.
        num_pages: columns that hold nothing new to the cache.
        digest: of the tokens in these columns.
    """

    epoch: int
    handles: list[int] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    entries: list[Entry] = dataclasses.field(default_factory=list)
    num_pages: int = 0
    digest: bytes = b""


class PrefixCache:
    """Entries for published pages, the least recently used of which go first.

    Args:
        page_size: tokens a page holds.
        num_handles: most entries.
        keyed_by_next: whether what is cached at a position depends on the token after it.
    """

    def __init__(self, page_size: int, num_handles: int, keyed_by_next: bool) -> None:
        self.page_size, self.num_handles, self.keyed_by_next = page_size, num_handles, keyed_by_next
        self._epoch = 0
        self._clear()

    def _clear(self) -> None:
        self._entries: dict[bytes, dict[int | None, Entry]] = {}
        self._idle: dict[int, Entry] = {}  # by handle, the least recently used first
        self._free = list(range(self.num_handles))[::-1]

    @property
    def num_entries(self) -> int:
        """Pages published."""
        return self.num_handles - len(self._free)

    @property
    def num_idle(self) -> int:
        """Entries that no running request uses, whose pages an eviction frees."""
        return len(self._idle)

    def match(self, token_ids: Sequence[int]) -> Match:
        """The longest cached prefix, short of the last token, whose logits are wanted. The request uses it."""
        match = Match(self._epoch)
        while (end := (match.num_pages + 1) * self.page_size) <= len(token_ids):
            digest = self._digest(match, token_ids)
            entries = self._entries.get(digest, {})
            entry = entries.get(self._key(token_ids, end)) if end < len(token_ids) else None
            if entry is None:
                if entries and self.page_size > 1:
                    self._match_in_part(match, next(iter(entries.values())))
                break
            self._use(match, entry)
            self._advance(match, digest)
            match.handles.append(entry.handle)
            match.num_tokens = end
        return match

    def _match_in_part(self, match: Match, entry: Entry) -> None:
        """All but the last position of a page, by a copy. The row will not hold it, so it is not kept from eviction.

        (Were it kept, a request alone in a pool of just its size might wait for that page for ever.)
        """
        match.handles.append(entry.handle)
        match.num_tokens += self.page_size - 1
        if entry.handle in self._idle:
            self._idle[entry.handle] = self._idle.pop(entry.handle)

    def publish(self, token_ids: Sequence[int], kv_len: int, match: Match) -> dict[int, int]:
        """Enters the full pages of a running request that are new, as many as there are handles. It uses them.

        Args:
            token_ids: the request's tokens so far.
            kv_len: how many of them are cached.
            match: what it has of the cache.

        Returns:
            The new handle of each column to publish.

        Raises:
            ValueError: a cached token is not known, or none after it.
        """
        if kv_len >= len(token_ids):
            raise ValueError(f"kv_len: got {kv_len}, expected fewer than the {len(token_ids)} tokens")
        columns = {}
        # What was cached before a reset is not to come back after it.
        while match.epoch == self._epoch and (end := (match.num_pages + 1) * self.page_size) <= kv_len:
            digest, key = self._digest(match, token_ids), self._key(token_ids, end)
            if key not in self._entries.get(digest, {}):
                if not self._free:
                    break
                entry = Entry(digest, key, self._free.pop())
                self._entries.setdefault(digest, {})[key] = entry
                self._use(match, entry)
                columns[match.num_pages] = entry.handle
            self._advance(match, digest)
        return columns

    def release(self, match: Match) -> None:
        """The request uses nothing any more; a second release finds nothing to give back."""
        if match.epoch == self._epoch:
            # Backwards, since a page is of no use without those before it: the tail is to be evicted first.
            for entry in reversed(match.entries):
                entry.num_users -= 1
                if not entry.num_users:
                    self._idle[entry.handle] = entry
        match.entries.clear()

    def evict(self, count: int) -> list[int]:
        """Forgets up to `count` entries that no running request uses. Returns their handles, to be withdrawn."""
        evicted = list(itertools.islice(self._idle.values(), count))
        for entry in evicted:
            del self._idle[entry.handle], self._entries[entry.digest][entry.next_token]
            if not self._entries[entry.digest]:
                del self._entries[entry.digest]
            self._free.append(entry.handle)
        return [entry.handle for entry in evicted]

    def reset(self) -> list[int]:
        """Forgets everything. Returns all handles in use, to be withdrawn; running requests publish nothing more."""
        handles = [entry.handle for entries in self._entries.values() for entry in entries.values()]
        self._epoch += 1
        self._clear()
        return handles

    def _use(self, match: Match, entry: Entry) -> None:
        entry.num_users += 1
        self._idle.pop(entry.handle, None)
        match.entries.append(entry)

    def _advance(self, match: Match, digest: bytes) -> None:
        match.num_pages, match.digest = match.num_pages + 1, digest

    def _digest(self, match: Match, token_ids: Sequence[int]) -> bytes:
        """Of the page after those that `match` is beyond."""
        page = token_ids[match.num_pages * self.page_size : (match.num_pages + 1) * self.page_size]
        return hashlib.sha256(match.digest + np.asarray(page, "<i4").tobytes()).digest()

    def _key(self, token_ids: Sequence[int], end: int) -> int | None:
        return int(token_ids[end]) if self.keyed_by_next else None
