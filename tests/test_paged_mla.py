"""The attention and append ops against a plain float64 reference, on permuted pages full of NaN elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mla_oracle import Scene, random_tree

from pallas_kernels.latent_append import latent_append
from pallas_kernels.paged_mla import paged_mla

LAYERS, PAGES, SIZE, WIDTH, ROPE, HEADS = 2, 40, 4, 32, 16, 4
ATTEND = jax.jit(paged_mla, static_argnames=("scale", "first"))


def scene(starts, lengths, num_queries, seed=0, columns=18, scale=1.0):
    """Random queries and pools in which only the slots that count are finite; unused table entries are huge."""
    rng = np.random.default_rng(seed)
    rows = len(starts)
    latent = np.full((LAYERS, PAGES, SIZE, WIDTH), np.nan, np.float32)
    rope = np.full((LAYERS, PAGES, SIZE, ROPE), np.nan, np.float32)
    ids = np.full((rows, columns), 10**9, np.int32)
    free = iter(rng.permutation(np.arange(1, PAGES)))
    for row, end in enumerate(np.add(starts, lengths)):
        for position in range(end):
            if position % SIZE == 0:
                ids[row, position // SIZE] = next(free)
            at = (1, ids[row, position // SIZE], position % SIZE)
            latent[at], rope[at] = rng.normal(size=WIDTH), rng.normal(size=ROPE)
    q_latent = scale * rng.normal(size=(rows, num_queries, HEADS, WIDTH)).astype(np.float32)
    q_rope = scale * rng.normal(size=(rows, num_queries, HEADS, ROPE)).astype(np.float32)
    return q_latent, q_rope, latent, rope, ids


def reference(q_latent, q_rope, latent, rope, ids, starts, lengths, scale, first=0):
    out = np.zeros(q_latent.shape)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for j in range(length):
            seen = np.arange(first, start + j + 1)
            if not len(seen):
                continue
            pages, slots = ids[row][seen // SIZE], seen % SIZE
            c, r = latent[1, pages, slots].astype(np.float64), rope[1, pages, slots].astype(np.float64)
            scores = scale * (q_latent[row, j] @ c.T + q_rope[row, j] @ r.T)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[row, j] = weights / weights.sum(-1, keepdims=True) @ c
    return out


def attend(arrays, starts, lengths, scale, first=0):
    q_latent, q_rope, latent, rope, ids = (jnp.asarray(x) for x in arrays)
    where = (jnp.int32(1), ids, jnp.array(starts, jnp.int32), jnp.array(lengths, jnp.int32))
    return np.asarray(ATTEND(q_latent, q_rope, latent, rope, *where, scale=scale, first=first))


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [
        ([0, 2, 3], [1, 1, 1]),  # contexts of 1, S - 1, S
        ([4, 36, 60], [1, 4, 2]),  # S + 1, 37 and more
        ([0, 0, 15], [4, 2, 0]),  # a whole prompt, part of one, a row that sits out
    ],
)
def test_equals_the_reference(starts, lengths):
    arrays = scene(starts, lengths, 4)
    expected = reference(*arrays, starts, lengths, 0.3)
    got = attend(arrays, starts, lengths, 0.3)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(got[row, :length], expected[row, :length], atol=2e-6)
    assert np.isfinite(got).all(), "queries that do not count stay finite"


def test_positions_before_the_first_are_not_seen():
    starts, lengths = [0, 5], [3, 3]
    arrays = scene(starts, lengths, 3)
    arrays[2][1, arrays[4][:, 0], 0] = np.nan
    expected = reference(*arrays, starts, lengths, 0.3, first=1)
    np.testing.assert_allclose(attend(arrays, starts, lengths, 0.3, first=1), expected, atol=2e-6)


def test_very_negative_scores_are_a_softmax_like_any_other():
    """Field case i4: a finite mask value would lie above valid scores of -1e5."""
    starts, lengths = [9, 30], [1, 1]
    arrays = scene(starts, lengths, 1)
    arrays[0][:] = arrays[1][:] = 0
    arrays[1][..., 0] = -1.0
    arrays[3][..., 0] = 1e5 + np.arange(SIZE)  # the slots of a page differ, exactly in float32
    expected = reference(*arrays, starts, lengths, 1.0)
    np.testing.assert_allclose(attend(arrays, starts, lengths, 1.0), expected, atol=1e-5)


def test_a_row_without_queries_reads_nothing():
    arrays = scene([0], [0], 2)
    assert (attend(arrays, [0], [0], 1.0) == 0).all()


def test_shapes_that_do_not_belong_together_are_refused(unchecked_annotations):
    q_latent, q_rope, latent, rope, ids = (jnp.asarray(x) for x in scene([0], [1], 1))
    where = (jnp.int32(0), ids, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match=r"got \(2, 40, 4\) and \(2, 39, 4\)"):
        paged_mla(q_latent, q_rope, latent, rope[:, 1:], *where, 1.0)
    with pytest.raises(ValueError, match=r"got \(31, 16\), expected \(32, 16\)"):
        paged_mla(q_latent[..., 1:], q_rope, latent, rope, *where, 1.0)
    wide = jnp.repeat(q_latent, 5, axis=1), jnp.repeat(q_rope, 5, axis=1)
    with pytest.raises(ValueError, match="5 query tokens do not fit a table of 4 slots"):
        paged_mla(*wide, latent, rope, jnp.int32(0), ids[:, :1], *where[2:], 1.0)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "masks",
    [
        {"sliding_window": 1},
        {"sliding_window": 70, "first": 65},
        {"tree": [random_tree(40, seed) for seed in range(3)]},  # both words
        {"tree": [random_tree(40, seed) for seed in range(3)], "first": 1},
    ],
)
def test_windows_and_trees(masks, fp8):
    Scene([300, 0, 62], [40, 7, 40], 40, 2, 16, fp8=fp8, **masks).check(backend="xla")


def test_a_wrong_window_or_tree_is_seen():
    for right, wrong in (({"sliding_window": 70}, {"window": 69}), ({"tree": [random_tree(5)]}, {"tree": None})):
        scene = Scene([90], [5], 5, 2, 16, **right)
        got = scene.attend(backend="xla")
        vars(scene).update(wrong)
        assert scene.error(got) > 1


@pytest.mark.parametrize(
    ("num_queries", "masks", "message"),
    [
        (1, {"sliding_window": 0}, "sliding_window must be at least 1, the query's own position: got 0"),
        (2, {"sliding_window": 5, "tree_mask": jnp.zeros((1, 2, 2), jnp.uint32)}, "give one of the two"),
        (65, {"tree_mask": jnp.zeros((1, 65, 2), jnp.uint32)}, "for up to 64 query tokens: got 65"),
    ],
)
def test_masks_that_mean_nothing_are_refused(num_queries, masks, message):
    q_latent, q_rope, latent, rope, ids = (jnp.asarray(x) for x in scene([0], [1], num_queries))
    where = (jnp.int32(0), ids, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match=message):
        paged_mla(q_latent, q_rope, latent, rope, *where, 1.0, **masks)


def test_append_writes_its_slots_of_its_layer_and_nothing_else():
    rng = np.random.default_rng(0)
    pools = jnp.zeros((LAYERS, PAGES, SIZE, WIDTH)), jnp.zeros((LAYERS, PAGES, SIZE, ROPE))
    slots = np.array([[5, 6, 0], [151, 0, 0]], np.int32)
    values = rng.normal(size=(2, 3, WIDTH)).astype(np.float32), rng.normal(size=(2, 3, ROPE)).astype(np.float32)
    appended = jax.jit(latent_append)(*pools, jnp.int32(1), jnp.asarray(slots), *map(jnp.asarray, values))
    for pool, value in zip(appended, values, strict=True):
        expected = np.zeros(pool.shape, np.float32)
        for row, column in ((0, 0), (0, 1), (1, 0)):
            expected[1, slots[row, column] // SIZE, slots[row, column] % SIZE] = value[row, column]
        expected[1, 0, 0] = np.asarray(pool)[1, 0, 0]  # scratch holds whichever came last
        np.testing.assert_array_equal(pool, expected)


def test_append_in_a_scan_copies_no_pool():
    """The pool is carried through the layers in place: the compiled program's temporaries are smaller than it."""

    def layers(latent, rope, slots, values):
        def step(pools, layer):
            return latent_append(*pools, layer, slots, values, values[..., :ROPE]), None

        return jax.lax.scan(step, (latent, rope), jnp.arange(LAYERS))[0]

    shape = jax.ShapeDtypeStruct
    pools = shape((LAYERS, 4000, SIZE, WIDTH), jnp.float32), shape((LAYERS, 4000, SIZE, ROPE), jnp.float32)
    tokens = shape((2, 4), jnp.int32), shape((2, 4, WIDTH), jnp.float32)
    memory = jax.jit(layers, donate_argnums=(0, 1)).lower(*pools, *tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < LAYERS * 4000 * SIZE * ROPE * 4
