"""The Mosaic kernels on the CPU, interpreted with race detection, against float64 numpy; and checks that can fail.

Here `few_rows`, what both kernels share, and the choice between them; `many_rows` is in test_paged_mla_many_rows.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mla_oracle import LAYER, SCALE, Replaced, Scene, checked_wgmma, random_tree

from pallas_kernels import compat
from pallas_kernels.paged_mla import few_rows, mosaic, paged_mla, tuning, walk
from pallas_kernels.paged_mla.splits import make_splits, row_blocks

plgpu = mosaic.plgpu


@pytest.fixture(autouse=True)
def checked_reads(monkeypatch):
    monkeypatch.setattr(few_rows, "plgpu", Replaced(wgmma=checked_wgmma))


@pytest.mark.parametrize(
    ("starts", "lengths", "num_queries"),
    [
        ([0, 62, 63, 64, 36], [1, 1, 1, 1, 1], 1),  # contexts of 1, S - 1, S, S + 1, 37
        ([0, 0, 62, 64, 200, 0], [0, 2, 2, 1, 2, 0], 2),  # idle rows at both ends, a query that does not count
        ([0, 61, 130, 0], [3, 3, 2, 3], 3),  # whole prompts; queries across a page's end
    ],
)
def test_equals_float64(starts, lengths, num_queries):
    Scene(starts, lengths, num_queries, 16).check()


@pytest.mark.parametrize(("num_queries", "heads"), [(1, 4), (1, 20), (5, 16), (4, 20), (6, 16)])
def test_rows_need_not_fill_a_tile_nor_fit_one(num_queries, heads):
    Scene([100, 40], [num_queries, 1], num_queries, heads).check(num_parts=2)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("size", [16, 32, 128])
def test_page_sizes(size, fp8):
    Scene([size - 1, 100, 150, 3], [2, 1, 2, 1], 2, 16, size, fp8=fp8).check()


@pytest.mark.parametrize(("num_parts", "start"), [(1, 500), (2, 500), (7, 500), (40, 1200)])
def test_splits_of_a_row_add_up(num_parts, start):
    """Up to a part for each block, more than are combined at once."""
    Scene([start, 0, 130], [2, 0, 1], 2, 16).check(num_parts)


@pytest.mark.parametrize(("first", "size"), [(1, 64), (64, 64), (70, 64), (83, 16), (150, 128)])
def test_positions_before_the_first_are_not_seen(first, size):
    Scene([300, first - 1, 0, 180], [2, 2, 1, 1], 2, 16, size, first=first).check()


@pytest.mark.parametrize(("window", "size"), [(1, 64), (64, 64), (70, 16), (130, 128)])
def test_a_sliding_window_hides_what_is_before(window, size):
    """By query: each has a window of its own. Pages before all windows may be gone."""
    Scene([300, window - 1, 0, 180], [3, 3, 1, 2], 3, 16, size, first=1, sliding_window=window).check()


@pytest.mark.parametrize("fp8", [False, True])
def test_trees(fp8):
    """Of 5 nodes in two tiles, across a page's end; another by row, and one row with fewer nodes."""
    trees = [random_tree(5, seed) for seed in range(3)]
    Scene([62, 0, 150], [5, 5, 3], 5, 16, tree=trees, fp8=fp8, first=1).check()


def test_whole_rows_end_where_each_tile_does(monkeypatch):
    """As prefill has them: a part for each row; tiles without a query that counts are zeros."""
    monkeypatch.setattr(tuning, "WHOLE_TILES", 2)
    scene = Scene([0, 150, 70, 0], [9, 4, 9, 0], 9, 16, fp8=True)
    scene.check()
    got = scene.attend()
    assert (got[1, 6:] == 0).all()


@pytest.mark.parametrize(
    ("starts", "lengths", "num_queries"), [([0, 200, 63], [1, 1, 0], 1), ([61, 0, 300], [3, 3, 2], 3)]
)
def test_fp8_latents_are_used_with_their_scales(starts, lengths, num_queries):
    Scene(starts, lengths, num_queries, 16, fp8=True).check()


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**40])
def test_fp8_takes_queries_of_any_size(factor):
    """In float16 they would be 0 or infinite. The keys make up for it, so that the scores stay small."""
    scene = Scene([70], [1], 1, 16, fp8=True)
    scene.rope = (scene.rope.astype(jnp.float32) / factor).astype(jnp.bfloat16)
    scene.q_rope = (scene.q_rope.astype(jnp.float32) * factor).astype(jnp.bfloat16)
    scene.q_latent = (scene.q_latent.astype(jnp.float32) * min(factor, 1)).astype(jnp.bfloat16)
    scene.check()


@pytest.mark.parametrize(("heads", "fp8"), [(16, False), (16, True), (64, False)])
def test_very_negative_scores_are_a_softmax_like_any_other(heads, fp8):
    """Field case i4: a finite mask value would lie above valid scores of -1e5."""
    scene = Scene([70, 0], [1, 0], 1, heads, fp8=fp8)
    scene.q_latent, scene.q_rope = scene.q_latent * 0, (scene.q_rope * 0).at[..., 0].set(-1)
    scene.rope = scene.rope.at[..., 0].add(1e5 / SCALE)
    assert (SCALE * scene.rope[LAYER, scene.ids[0, 0], :, 0] > 9e4).all()
    scene.check()


def test_the_layer_is_traced():
    """One program reads the layer it is told to."""
    scene = Scene([70], [1], 1, 16)
    arrays, ids = scene.arrays, scene.ids
    start, length = jnp.array([70]), jnp.array([1])

    @jax.jit
    def run(pools, layer):
        where, splits = (layer, ids, start, length, SCALE), make_splits(start, length, 2, few_rows.BLOCK)
        options = {"splits": splits, "interpret": compat.interpret_params()}
        return mosaic.paged_mla_mosaic(*arrays[:2], *pools, *where, **options)

    other = tuple(x[::-1] for x in arrays[2:])
    np.testing.assert_array_equal(run(arrays[2:], jnp.int32(LAYER)), run(other, jnp.int32(1 - LAYER)))


@pytest.mark.parametrize("window", [None, 200])
def test_split_tables_cover_every_block_once_and_evenly(window):
    rng, batch = np.random.default_rng(0), 8
    make = jax.jit(make_splits, static_argnums=(2, 3, 4, 5))
    for num_parts, block, first in [(1, 64, 70), (5, 128, 0), (19, 64, 300)] * 8:
        starts = jnp.asarray(rng.integers(0, 1500, batch) * rng.integers(0, 2, batch), jnp.int32)
        lengths = jnp.asarray(rng.integers(0, 4, batch), jnp.int32)
        splits = jax.tree.map(np.asarray, make(starts, lengths, num_parts, block, first, window))
        blocks = np.asarray(row_blocks(starts, lengths, block, first, window))
        done, parts, loads = [[] for _ in blocks], [set() for _ in blocks], []
        for part, (first_row, begin, last_row, end) in enumerate(splits.parts):
            loads.append(0)
            for row in range(first_row, last_row + 1):
                low = begin if row == first_row else 0
                high = min(end, blocks[row]) if row == last_row else blocks[row]
                done[row] += range(low, high)
                loads[-1] += high - low
                parts[row] |= {part} if high > low else set()
        assert done == [list(range(n)) for n in blocks]
        assert parts == [set(range(low, high + 1)) for low, high, _ in splits.rows]
        working = [row for row, n in enumerate(blocks) if n]
        following = [min((w for w in working if w > row), default=batch) for row in range(batch)]
        assert following == list(splits.rows[:, 2])
        assert max(loads) <= -(-(blocks.sum() + 320 // block * batch) // num_parts)


def unsynchronised(monkeypatch):
    """The warpgroups do not wait for each other's scores and weights."""
    monkeypatch.setattr(compat, "synchronise", lambda barrier: None)


def loaded_early(monkeypatch):
    """The next block is loaded before, not after, the present one is used up."""
    attend = few_rows._attend_block

    def load_first(*args):
        args[-1]()
        return attend(*args[:-1], lambda: None)

    monkeypatch.setattr(few_rows, "_attend_block", load_first)


def queries_early(monkeypatch):
    """The next row's queries are loaded when a row begins."""
    run = few_rows._run_row

    def load_first(call, gmem, smem, part, group, segment, carry):
        plgpu.barrier_wait(smem.q_loaded.at[group])
        following = walk.cursor_at(call, gmem, part, gmem.rows[segment.row, 2])
        few_rows._load_queries(call, gmem, smem, part, following, group)
        with monkeypatch.context() as patched:
            patched.setattr(few_rows, "_load_queries", lambda *args: None)
            patched.setattr(few_rows, "plgpu", Replaced(wgmma=checked_wgmma, barrier_wait=skip_queries(smem)))
            return run(call, gmem, smem, part, group, segment, carry)

    monkeypatch.setattr(few_rows, "_run_row", load_first)


def skip_queries(smem):
    def wait(barrier):
        if getattr(barrier, "ref", barrier) is not smem.q_loaded:
            plgpu.barrier_wait(barrier)

    return wait


@pytest.mark.parametrize(
    ("mutant", "fp8"),
    [
        (unsynchronised, False),
        (unsynchronised, True),
        (loaded_early, False),
        (loaded_early, True),
        (queries_early, False),  # in FP8 the fence of the conversion hides it from the detector of jax 0.11.2
    ],
)
@pytest.mark.usefixtures("fresh_interpreter")
def test_the_race_detector_catches(mutant, fp8, monkeypatch):
    scene = Scene([70, 100, 200], [2, 1, 2], 2, 16, fp8=fp8)  # rows in one part: queries and sums are replaced too
    mutant(monkeypatch)
    with pytest.raises(Exception, match="RACE DETECTED"):
        scene.attend(num_parts=1)


def wrong(scene):
    got = scene.attend(num_parts=2)
    return not np.isfinite(got).all() or scene.error(got) > 1


@pytest.mark.parametrize(
    ("name", "mutant", "options"),
    [
        ("clear_unseen", lambda *args: None, {}),  # 0 * NaN
        ("is_masked", lambda *args: jnp.bool_(False), {}),
        ("seen", lambda call, here, row, at, tree: walk.seen(call, here, row, at - 1, tree), {}),
        ("seen", lambda call, here, row, at, tree: walk.seen(call, here, row, at + 1, tree), {"sliding_window": 66}),
        ("row_mask", lambda *args: tuple(word << 1 for word in walk.row_mask(*args)), {"tree": [random_tree(2)] * 3}),
        ("NUM_SCALES", 1, {"fp8": True}),
    ],
)
def test_the_numbers_catch(name, mutant, options, monkeypatch):
    scene = Scene([70, 100, 200], [2, 1, 2], 2, 16, **options)
    assert not wrong(scene)
    monkeypatch.setattr(few_rows, name, mutant)
    assert wrong(scene)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("size", "first"), [(16, 0), (16, 83), (32, 0), (64, 70), (128, 150)])
def test_every_load_is_of_a_page_in_use(size, first, block):
    """Apart from the kernel: TMA loads out of bounds raise nothing, neither interpreted nor on a GPU."""
    starts, lengths, num_pages = jnp.array([first + 1, first + size, 400]), jnp.array([1, 1, 3]), 60
    used = [np.arange(first // size, int(end - 1) // size + 1) for end in starts + lengths]
    ids = np.full((3, 30), 10**9)
    for row, columns in enumerate(used):
        ids[row, columns] = 100 * row + columns
    shape = {"batch": 3, "num_queries": 1, "heads": 16, "num_pages": num_pages, "page_size": size, "columns": 30}
    masks = {"first": first, "sliding_window": None, "tree": False, "quantised": False, "whole": False}
    tiles = {"num_parts": 1, "row_tile": 16, "block_tokens": block, "stages": 2}
    call = walk.Call(**shape, **masks, **tiles, scale=SCALE)
    refs = dict.fromkeys(walk.Operands._fields) | {"layer": [LAYER], "start": starts, "length": lengths}
    gmem, part = walk.Operands(**refs | {"page_ids": jnp.asarray(ids)}), walk.Part(*map(jnp.int32, (0, 0, 2, 99)))
    for row, columns in enumerate(used):
        cursor, loaded = walk.cursor_at(call, gmem, part, jnp.int32(row)), []
        for at in range(cursor.block, cursor.end_block):
            loaded += walk.pages(call, gmem, cursor._replace(block=jnp.int32(at)))
        found = {int(piece) // call.pieces - LAYER * num_pages - 100 * row for piece in loaded}
        assert found == set(columns)


def test_on_a_cpu_the_choice_is_xla_and_mosaic_says_why_not():
    scene = Scene([70], [1], 1, 16)
    where = (jnp.int32(LAYER), scene.ids, jnp.array([70]), jnp.array([1]), SCALE)
    arrays = scene.arrays
    np.testing.assert_array_equal(paged_mla(*arrays, *where), paged_mla(*arrays, *where, backend="xla"))
    with pytest.raises(NotImplementedError, match="paged_mla cannot: it needs a Hopper GPU"):
        paged_mla(*arrays, *where, backend="mosaic")
    with pytest.raises(ValueError, match="got 'triton', expected 'mosaic', 'xla' or None"):
        paged_mla(*arrays, *where, backend="triton")


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (((1, 1, 16), (2, 9, 64), 512, jnp.float32), "must be bfloat16, .* got float32"),
        (((1, 1, 16), (2, 9, 64), 256, jnp.bfloat16), r"must be \(512, 64\) wide: got \(256, 64\)"),
        (((1, 1, 16), (2, 9, 48), 512, jnp.bfloat16), "no tile for 16 rows .* pages of 48"),
    ],
)
def test_what_the_kernel_was_not_written_for_is_refused(shapes, reason):
    queries, pools, width, dtype = shapes
    arrays = [jnp.zeros((*shape, w), dtype) for shape in (queries, pools) for w in (width, walk.ROPE)]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(mosaic.unsupported(*arrays))


def test_the_table_has_a_tile_for_every_call_and_pays_for_few_rows_more():
    for dtype, least in (("bfloat16", 16), ("float8_e4m3fn", 16)):
        for rows in range(1, 400):
            config = tuning.tile_config(rows, 64, dtype)
            paid = config.tiles(rows) * config.row_tile
            assert paid >= rows
            assert paid - rows < 64
            if least <= rows <= 48:
                assert paid - rows < 8, "wgmma's step"
    assert tuning.tile_config(80, 64, "bfloat16").tiles(80) * tuning.tile_config(80, 64, "bfloat16").row_tile == 80
