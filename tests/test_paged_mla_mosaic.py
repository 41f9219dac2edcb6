"""The Mosaic kernel on the CPU, interpreted with race detection, against float64 numpy; and checks that can fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.paged_mla import make_splits, mosaic, paged_mla
from pallas_kernels.paged_mla.splits import BLOCK_TOKENS, row_blocks

plgpu = mosaic.plgpu
LAYER, LAYERS = 1, 2
LATENT, ROPE = mosaic.LATENT, mosaic.ROPE
SCALE = 0.05


class Replaced:
    """plgpu for the kernel, with some names replaced."""

    def __init__(self, **replaced):
        self.replaced = replaced

    def __getattr__(self, name):
        return self.replaced.get(name) or getattr(plgpu, name)


def checked_wgmma(accumulator, a, b):
    """wgmma with plain loads of its operands: the interpreter's own reads of them escape its race detector."""
    for operand in (a, b):
        plgpu.load(operand)
    plgpu.wgmma(accumulator, a, b)
    plgpu.commit_smem()  # unlike wgmma's, plain reads must be fenced off from a later TMA write


@pytest.fixture(autouse=True)
def checked_reads(monkeypatch):
    monkeypatch.setattr(mosaic, "plgpu", Replaced(wgmma=checked_wgmma))


def scene(starts, lengths, num_queries, heads, size):
    """Random queries and pools, NaN wherever no row may look; table entries not in use are huge or negative."""
    rng = np.random.default_rng(0)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    used = [-(-end // size) for end in ends]
    latent = np.full((LAYERS, sum(used) + 3, size, LATENT), np.nan)
    rope = np.full((LAYERS, sum(used) + 3, size, ROPE), np.nan)
    ids = np.full((len(starts), max(used) + 2), 10**9, np.int32)
    ids[:, -1] = -7
    free = iter(rng.permutation(np.arange(1, latent.shape[1])))
    for row, end in enumerate(ends):
        for position in range(end):
            if position % size == 0:
                ids[row, position // size] = next(free)
            at = (LAYER, ids[row, position // size], position % size)
            latent[at], rope[at] = rng.normal(size=LATENT), rng.normal(size=ROPE)
    shape = (len(starts), num_queries, heads)
    queries = rng.normal(size=(*shape, LATENT)), rng.normal(size=(*shape, ROPE))
    return tuple(jnp.asarray(x, jnp.bfloat16) for x in (*queries, latent, rope)), jnp.asarray(ids)


def expected(arrays, ids, starts, lengths, first=0):
    """Plain attention of the queries that count, in float64; zeros for the others."""
    q_latent, q_rope, latent, rope = (np.asarray(x.astype(jnp.float32), np.float64) for x in arrays)
    ids, size = np.asarray(ids), latent.shape[2]
    out = np.zeros(q_latent.shape)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for j in range(length):
            seen = np.arange(first, start + j + 1)
            if len(seen):
                keys = latent[LAYER, ids[row, seen // size], seen % size]
                rotated = rope[LAYER, ids[row, seen // size], seen % size]
                scores = SCALE * (q_latent[row, j] @ keys.T + q_rope[row, j] @ rotated.T)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                out[row, j] = weights / weights.sum(-1, keepdims=True) @ keys
    return out


def attend(arrays, ids, starts, lengths, num_parts, first=0):
    starts, lengths = jnp.array(starts, jnp.int32), jnp.array(lengths, jnp.int32)

    def run(arrays, ids, starts, lengths):
        splits = make_splits(starts, lengths, num_parts, first)
        interpret = compat.interpret_params(detect_races=True)
        where = (jnp.int32(LAYER), ids, starts, lengths)
        return mosaic.paged_mla_mosaic(*arrays, *where, SCALE, first, splits, interpret)

    return np.asarray(jax.jit(run)(arrays, ids, starts, lengths).astype(jnp.float32))


def check(starts, lengths, num_queries, heads, size=64, num_parts=3, first=0):
    arrays, ids = scene(starts, lengths, num_queries, heads, size)
    got = attend(arrays, ids, starts, lengths, num_parts, first)
    want = expected(arrays, ids, starts, lengths, first)
    for row, length in enumerate(lengths):
        # bfloat16 weights and output: a unit in the last place of the largest value, 4
        np.testing.assert_allclose(got[row, :length], want[row, :length], atol=2**-6)
        if length == 0:
            assert (got[row] == 0).all(), "a row without queries gives zeros"
    assert np.isfinite(got).all(), "queries that do not count stay finite"


@pytest.fixture
def fresh_interpreter():
    """Clears what a kernel that failed leaves behind."""
    yield
    compat.reset_interpreter()
    jax.clear_caches()


@pytest.mark.parametrize(
    ("starts", "lengths", "num_queries"),
    [
        ([0, 62, 63, 64, 36], [1, 1, 1, 1, 1], 1),  # contexts of 1, S - 1, S, S + 1, 37
        ([0, 0, 62, 64, 200, 0], [0, 2, 2, 1, 2, 0], 2),  # idle rows at both ends, a query that does not count
        ([0, 61, 130, 0], [4, 4, 2, 3], 4),  # whole prompts; queries across a page's end
        ([300, 5], [16, 9], 16),  # four tiles' worth of rows
    ],
)
def test_equals_float64(starts, lengths, num_queries):
    check(starts, lengths, num_queries, 16)


@pytest.mark.parametrize(("num_queries", "heads"), [(1, 20), (3, 20), (1, 64), (2, 64), (1, 128)])
def test_heads_need_not_fill_a_tile_nor_fit_one(num_queries, heads):
    check([100, 40], [num_queries, 1], num_queries, heads, num_parts=2)


@pytest.mark.parametrize("size", [16, 32, 128])
def test_page_sizes(size):
    check([size - 1, 100, 150, 3], [4, 2, 4, 1], 4, 16, size)


@pytest.mark.parametrize("num_parts", [1, 2, 7, 12])
def test_splits_of_a_row_add_up(num_parts):
    check([500, 0, 130], [2, 0, 1], 2, 16, num_parts=num_parts)


@pytest.mark.parametrize(("first", "size"), [(1, 64), (64, 64), (70, 64), (83, 16), (150, 128)])
def test_positions_before_the_first_are_not_seen(first, size):
    starts, lengths = [300, first - 1, 0, 180], [2, 2, 1, 1]
    arrays, ids = scene(starts, lengths, 2, 16, size)
    want = expected(arrays, ids, starts, lengths, first)
    latent = arrays[2]
    for row in range(4):  # what nobody sees may be anything, and its pages may be gone
        for position in range(min(first, starts[row] + lengths[row])):
            latent = latent.at[LAYER, ids[row, position // size], position % size].set(jnp.nan)
    got = attend((*arrays[:2], latent, arrays[3]), ids.at[:, : first // size].set(10**9), starts, lengths, 3, first)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(got[row, :length], want[row, :length], atol=2**-6)


def test_the_layer_is_traced():
    """One program reads the layer it is told to."""
    arrays, ids = scene([70], [1], 1, 16, 64)
    other = tuple(x[::-1] for x in arrays[2:])
    start, length = jnp.array([70]), jnp.array([1])

    @jax.jit
    def run(pools, layer):
        splits, interpret = make_splits(start, length, 2), compat.interpret_params()
        return mosaic.paged_mla_mosaic(*arrays[:2], *pools, layer, ids, start, length, SCALE, 0, splits, interpret)

    np.testing.assert_array_equal(run(arrays[2:], jnp.int32(LAYER)), run(other, jnp.int32(1 - LAYER)))


def test_split_tables_cover_every_block_once_and_evenly():
    rng = np.random.default_rng(0)
    for _ in range(25):
        batch, num_parts, first = rng.integers(1, 9), int(rng.integers(1, 20)), int(rng.choice([0, 70, 300]))
        starts = jnp.asarray(rng.integers(0, 1500, batch) * rng.integers(0, 2, batch), jnp.int32)
        lengths = jnp.asarray(rng.integers(0, 4, batch), jnp.int32)
        splits = jax.tree.map(np.asarray, make_splits(starts, lengths, num_parts, first))
        blocks = np.asarray(row_blocks(starts, lengths, first))
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
        assert max(loads) <= -(-(blocks.sum() + 5 * batch) // num_parts)


STARTS, LENGTHS = [70, 100, 200], [2, 1, 2]  # two rows in one part: queries and sums are replaced too


def unsynchronised(monkeypatch):
    """The warpgroups do not wait for each other's maxima and weights."""
    monkeypatch.setattr(compat, "synchronise", lambda barrier: None)


def released_early(monkeypatch):
    """The next block is loaded before, not after, the second warpgroup has released the place."""
    released, due = [], []
    shared, load = mosaic.Shared, mosaic._load_block

    def wait(barrier):
        if barrier is released[-1]:
            due.append(barrier)
        else:
            plgpu.barrier_wait(barrier)

    def load_then_wait(*args):
        load(*args)
        if due:
            plgpu.barrier_wait(due.pop())

    monkeypatch.setattr(mosaic, "Shared", lambda **refs: released.append(refs["released"]) or shared(**refs))
    monkeypatch.setattr(mosaic, "_load_block", load_then_wait)
    monkeypatch.setattr(mosaic, "plgpu", Replaced(wgmma=checked_wgmma, barrier_wait=wait))


@pytest.mark.parametrize("mutant", [unsynchronised, released_early])
@pytest.mark.usefixtures("fresh_interpreter")
def test_the_race_detector_catches(mutant, monkeypatch):
    arrays, ids = scene(STARTS, LENGTHS, 2, 16, 64)
    mutant(monkeypatch)
    with pytest.raises(Exception, match="RACE DETECTED"):
        attend(arrays, ids, STARTS, LENGTHS, 1)


def test_the_numbers_catch_a_missing_guard_or_mask(monkeypatch):
    arrays, ids = scene(STARTS, LENGTHS, 2, 16, 64)
    with monkeypatch.context() as patched:
        patched.setattr(mosaic, "_clear_unseen", lambda *args: None)
        assert np.isnan(attend(arrays, ids, STARTS, LENGTHS, 2)).any(), "0 * NaN"
    with monkeypatch.context() as patched:
        seen = mosaic._seen
        patched.setattr(mosaic, "_seen", lambda call, segment, at: seen(call, segment, at - 1))
        got = attend(arrays, ids, STARTS, LENGTHS, 2)
        assert not np.allclose(got, expected(arrays, ids, STARTS, LENGTHS), atol=2**-6), "one position too many"


@pytest.mark.parametrize(("size", "first"), [(16, 0), (16, 83), (32, 0), (64, 70), (128, 150)])
def test_every_load_is_of_a_page_in_use(size, first):
    """Apart from the kernel: TMA loads out of bounds raise nothing, neither interpreted nor on a GPU."""
    starts, lengths, pages = jnp.array([first + 1, first + size, 400]), jnp.array([1, 1, 3]), 60
    used = [np.arange(first // size, int(end - 1) // size + 1) for end in starts + lengths]
    ids = np.full((3, 30), 10**9)
    for row, columns in enumerate(used):
        ids[row, columns] = 100 * row + columns
    call = mosaic.Call(3, 1, 16, pages, size, 30, 1, SCALE, first, 2)
    refs = dict.fromkeys(mosaic.Operands._fields) | {"layer": [LAYER], "start": starts, "length": lengths}
    gmem, part = mosaic.Operands(**refs | {"page_ids": jnp.asarray(ids)}), mosaic.Part(*map(jnp.int32, (0, 0, 2, 99)))
    pieces = max(size // 64, 1)
    for row, columns in enumerate(used):
        cursor, loaded = mosaic._cursor(call, gmem, part, jnp.int32(row)), []
        for block in range(cursor.block, cursor.end_block):
            loaded += mosaic._pages(call, gmem, cursor._replace(block=jnp.int32(block)))
        found = {int(piece) // pieces - LAYER * pages - 100 * row for piece in loaded}
        assert found == set(columns)


def test_on_a_cpu_the_choice_is_xla_and_mosaic_says_why_not():
    arrays, ids = scene([70], [1], 1, 16, 64)
    where = (jnp.int32(LAYER), ids, jnp.array([70]), jnp.array([1]), SCALE)
    np.testing.assert_array_equal(paged_mla(*arrays, *where), paged_mla(*arrays, *where, backend="xla"))
    with pytest.raises(NotImplementedError, match="paged_mla cannot: it needs a Hopper GPU"):
        paged_mla(*arrays, *where, backend="mosaic")
    with pytest.raises(ValueError, match="got 'triton', expected 'mosaic', 'xla' or None"):
        paged_mla(*arrays, *where, backend="triton")


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (((1, 1, 16), (2, 9, 64), 512, jnp.float32), "must be bfloat16: got float32"),
        (((1, 1, 16), (2, 9, 64), 256, jnp.bfloat16), r"must be \(512, 64\) wide: got \(256, 64\)"),
        (((1, 1, 16), (2, 9, 48), 512, jnp.bfloat16), "no tile for 16 rows .* pages of 48"),
        (((1, 512, 16), (2, 9, 64), 512, jnp.bfloat16), "no tile for 8192 rows"),
    ],
)
def test_what_the_kernel_was_not_written_for_is_refused(shapes, reason):
    queries, pools, width, dtype = shapes
    arrays = [jnp.zeros((*shape, w), dtype) for shape in (queries, pools) for w in (width, ROPE)]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(mosaic.unsupported(*arrays))


def test_the_block_is_the_kernels():
    assert BLOCK_TOKENS == mosaic.ROWS, "weights are a square tile"
