"""The kernel for tiles of 64 rows, interpreted with race detection, against float64; and checks that can fail."""

from types import SimpleNamespace

import numpy as np
import pytest
from mla_oracle import Replaced, Scene, checked_wgmma

from pallas_kernels.paged_mla import many_rows
from pallas_kernels.paged_mla.many_rows import FOLLOWER, LEADER

plgpu = many_rows.plgpu


@pytest.fixture(autouse=True)
def checked_reads(monkeypatch):
    monkeypatch.setattr(many_rows, "plgpu", Replaced(wgmma=checked_wgmma))


@pytest.mark.parametrize(
    ("starts", "lengths", "num_queries", "heads", "size"),
    [
        ([0, 62, 63, 64, 126, 127, 128, 36], [1] * 8, 1, 64, 64),  # contexts about a block and a pair
        ([0, 62, 126, 127, 200, 0], [0, 2, 2, 1, 2, 0], 2, 64, 16),  # idle rows at both ends, a query that is not one
        ([0, 61, 130, 0], [4, 4, 2, 3], 4, 16, 32),  # whole prompts; queries across a page's end, all in one tile
        ([125, 400], [3, 2], 3, 20, 128),  # rows that do not fill their tile
        ([253], [4], 4, 32, 64),  # across a pair's end
        ([70], [1], 1, 128, 64),
    ],
)
def test_equals_float64(starts, lengths, num_queries, heads, size):
    Scene(starts, lengths, num_queries, heads, size).check()


@pytest.mark.parametrize("num_parts", [1, 5, 12])
def test_splits_of_a_row_add_up(num_parts):
    Scene([700, 0, 130, 320], [1, 0, 1, 1], 1, 64).check(num_parts)  # 6, 2 and 3 pairs, 11, 3 and 6 blocks


@pytest.mark.parametrize(
    ("first", "window", "size"), [(70, None, 64), (150, None, 16), (0, 1, 64), (0, 130, 32), (200, 90, 128)]
)
def test_positions_out_of_sight(first, window, size):
    Scene([300, 0, max(first - 1, 0)], [2, 1, 2], 2, 64, size, first, window).check()


def tree(rng, nodes):
    """Each node sees itself and its ancestors."""
    mask = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        mask[node] |= mask[rng.integers(node)]
    return mask


@pytest.mark.parametrize(("nodes", "heads", "first"), [(5, 24, 0), (16, 16, 70), (64, 2, 0)])
def test_trees(nodes, heads, first):
    rng = np.random.default_rng(1)
    lengths = [nodes, 0, nodes - 2]
    trees = [tree(rng, max(length, 1)) for length in lengths]
    Scene([100, 0, 60], lengths, nodes, heads, first=first, tree=trees).check()


@pytest.mark.parametrize(
    ("starts", "lengths", "options"),
    [
        ([0, 150], [80, 5], {}),
        ([150, 0], [30, 0], {"sliding_window": 70, "size": 16}),
        ([90], [26], {"first": 100}),
    ],
)
def test_prefill(starts, lengths, options):
    """With so many row tiles each row is one part's. Tiles without queries that count give zeros."""
    scene = Scene(starts, lengths, 80, 16, **options)
    got = scene.attend()
    assert scene.error(got) <= 1
    for row, length in enumerate(lengths):
        assert (got[row, -(-length // 4) * 4 :] == 0).all()


ROWS = [300, 100], [1, 1]  # two rows in one part: queries and sums are replaced too


def not_waiting_for(group):
    def mutate(monkeypatch):
        """The weights of a warpgroup are used without waiting for them."""
        absent, shared = [], many_rows.Shared

        def make_shared(**refs):
            pair = [refs["weighed"].at[i] for i in range(2)]
            absent.append(pair[group])
            return shared(**refs | {"weighed": SimpleNamespace(at=pair)})

        def wait(barrier):
            if barrier is not absent[-1]:
                plgpu.barrier_wait(barrier)

        monkeypatch.setattr(many_rows, "Shared", make_shared)
        monkeypatch.setattr(many_rows, "plgpu", Replaced(wgmma=checked_wgmma, barrier_wait=wait))

    return mutate


def loads_swapped(group):
    def mutate(monkeypatch):
        """What a warpgroup loads after its first product in a step it loads after the second, and vice versa."""
        own, crossed = many_rows._load_own, many_rows._load_crossed
        monkeypatch.setattr(many_rows, "_load_own", lambda *args: (crossed if args[-1] == group else own)(*args))
        monkeypatch.setattr(many_rows, "_load_crossed", lambda *args: (own if args[-1] == group else crossed)(*args))

    return mutate


def rotary_keys_early(monkeypatch):
    """The first warpgroup loads the next rotary keys before it has used the weights in their place."""
    wanted = {many_rows.HALF: True, many_rows.ROPE: True}  # by width
    own, crossed = many_rows._load_own, many_rows._load_crossed

    def copy(source, target, barrier):
        if wanted[target.shape[-1]]:
            plgpu.copy_gmem_to_smem(source, target, barrier)

    def only(latent, rope, *args):
        wanted.update({many_rows.HALF: latent, many_rows.ROPE: rope})
        crossed(*args)
        wanted.update({many_rows.HALF: True, many_rows.ROPE: True})

    def load_own(*args):
        own(*args)
        only(False, args[-1] == LEADER, *args)

    monkeypatch.setattr(many_rows, "_load_own", load_own)
    monkeypatch.setattr(many_rows, "_load_crossed", lambda *args: only(True, args[-1] == FOLLOWER, *args))
    monkeypatch.setattr(many_rows, "plgpu", Replaced(wgmma=checked_wgmma, copy_gmem_to_smem=copy))


PAIR = [100], [1]  # of blocks: a warpgroup that does not wait must not get far ahead
MUTANTS = {
    "no wait for the leader's weights": (not_waiting_for(LEADER), PAIR),
    "no wait for the follower's weights": (not_waiting_for(FOLLOWER), PAIR),
    "the leader loads the other block's half early": (loads_swapped(LEADER), ROWS),
    "the follower loads its own block's half early": (loads_swapped(FOLLOWER), ROWS),
    "the leader loads rotary keys early": (rotary_keys_early, ROWS),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.usefixtures("fresh_interpreter")
def test_the_race_detector_catches(name, monkeypatch):
    mutate, rows = MUTANTS[name]
    scene = Scene(*rows, 1, 64)
    mutate(monkeypatch)
    with pytest.raises(Exception, match="RACE DETECTED"):
        scene.attend(num_parts=1)


def test_the_numbers_catch_a_missing_guard_or_mask(monkeypatch):
    scene = Scene(*ROWS, 1, 64)
    with monkeypatch.context() as patched:
        patched.setattr(many_rows, "_clear_unseen", lambda *args: None)
        assert np.isnan(scene.attend()).any(), "0 * NaN"
    with monkeypatch.context() as patched:
        seen = many_rows.seen
        patched.setattr(many_rows, "seen", lambda call, here, row, at, tree: seen(call, here, row, at - 1, tree))
        assert not np.allclose(scene.attend(), scene.expected(), atol=2**-6), "one position too many"
