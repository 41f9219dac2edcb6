"""Scenes for paged attention with NaN wherever no query may look, float64 attention over them, and the comparison."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import compat
from pallas_kernels.fp8 import quantize
from pallas_kernels.paged_mla import mosaic, paged_mla
from pallas_kernels.paged_mla.splits import make_splits
from pallas_kernels.paged_mla.tuning import tile_config
from pallas_kernels.paged_mla.walk import LATENT, ROPE

LAYER, LAYERS = 1, 2
SCALE = 0.05


class Replaced:
    """plgpu for a kernel, with some names replaced."""

    def __init__(self, **replaced):
        self.replaced = replaced

    def __getattr__(self, name):
        return self.replaced.get(name) or getattr(mosaic.plgpu, name)


def random_tree(num_nodes, seed=0):
    """Which nodes each node sees, bool: itself and its ancestors, whose numbers are lower."""
    rng = np.random.default_rng(seed)
    seen = np.eye(num_nodes, dtype=bool)
    for node in range(1, num_nodes):
        seen[node] |= seen[rng.integers(node)]
    return seen


def checked_wgmma(accumulator, a, b):
    """wgmma with plain loads of its operands: the interpreter's own reads of them escape its race detector."""
    for operand in (a, b):
        mosaic.plgpu.load(operand)
    mosaic.plgpu.wgmma(accumulator, a, b)
    mosaic.plgpu.commit_smem()  # unlike wgmma's, plain reads must be fenced off from a later TMA write


class Scene:
    """Random queries and pools. Slots that nobody sees hold NaN, and table entries not in use are huge or negative.

    `first` and `sliding_window` hide positions; `tree` gives each row's mask, bool [queries, nodes].
    """

    def __init__(
        self, starts, lengths, num_queries, heads, size=64, first=0, sliding_window=None, tree=None, fp8=False, seed=0
    ):
        rng = np.random.default_rng(seed)
        self.starts, self.lengths, self.first, self.window, self.tree = starts, lengths, first, sliding_window, tree
        lows = [max(first, start - (sliding_window or 10**9) + 1) for start in starts]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        used = sum(-(-end // size) for end in ends)
        latent = np.full((LAYERS, used + 3, size, LATENT), np.nan, np.float32)
        rope = np.full((LAYERS, used + 3, size, ROPE), np.nan, np.float32)
        ids = np.full((len(starts), -(-max(ends) // size) + 2), 10**9, np.int32)
        ids[:, -1] = -7
        free = iter(rng.permutation(np.arange(1, used + 3)))
        for row, (low, end) in enumerate(zip(lows, ends, strict=True)):
            for position in range(low, end):
                if ids[row, position // size] == 10**9:
                    ids[row, position // size] = next(free)
                at = (LAYER, ids[row, position // size], position % size)
                latent[at], rope[at] = rng.normal(size=LATENT), rng.normal(size=ROPE)
        shape = (len(starts), num_queries, heads)
        bf16 = jnp.bfloat16
        self.q_latent = jnp.asarray(rng.normal(size=(*shape, LATENT)), bf16)
        self.q_rope = jnp.asarray(rng.normal(size=(*shape, ROPE)), bf16)
        self.latent, self.rope, self.scales = jnp.asarray(latent, bf16), jnp.asarray(rope, bf16), None
        if fp8:  # noise of several binary orders, so that scales differ
            spread = 2.0 ** rng.integers(-9, 9, (*latent.shape[:3], LATENT // 128))
            wide = self.latent.astype(jnp.float32) * jnp.repeat(jnp.asarray(spread, jnp.float32), 128, axis=-1) * 1e-2
            self.latent, scales = quantize(wide)
            scales = jnp.where(jnp.isnan(wide[..., :1]), jnp.nan, scales)
            self.scales = jnp.moveaxis(scales, 2, 3)
        self.ids = jnp.asarray(ids)

    @property
    def arrays(self):
        return self.q_latent, self.q_rope, self.latent, self.rope

    @property
    def masks(self):
        """Arrays among the op's keyword arguments."""
        words = None
        if self.tree is not None:
            bits = np.zeros((*self.q_latent.shape[:2], 64), np.uint64)
            for row, mask in enumerate(self.tree):
                bits[row, : len(mask), : len(mask)] = mask
            words = (bits << np.arange(64, dtype=np.uint64)).sum(-1)
            words = jnp.asarray(np.stack([words & 0xFFFFFFFF, words >> np.uint64(32)], -1).astype(np.uint32))
        return {"scale_pool": self.scales, "tree_mask": words}

    def seen(self, row, query):
        """Positions that a query sees."""
        start, length = self.starts[row], self.lengths[row]
        if self.tree is None:
            low = max(self.first, start + query - (self.window or 10**9) + 1)
            return np.arange(low, start + query + 1)
        nodes = np.flatnonzero(self.tree[row][query][:length])
        seen = np.concatenate([np.arange(start), start + nodes]).astype(int)
        return seen[seen >= self.first]

    def expected(self):
        """Plain attention of the queries that count, in float64; zeros for the others."""
        wide = (np.asarray(x.astype(jnp.float32), np.float64) for x in self.arrays)
        q_latent, q_rope, latent, rope = wide
        if self.scales is not None:
            latent = latent * np.repeat(np.moveaxis(np.asarray(self.scales, np.float64), 2, 3), 128, axis=-1)
        ids, size = np.asarray(self.ids), latent.shape[2]
        out = np.zeros(q_latent.shape)
        for row, length in enumerate(self.lengths):
            for j in range(length):
                seen = self.seen(row, j)
                if len(seen):
                    keys = latent[LAYER, ids[row, seen // size], seen % size]
                    rotated = rope[LAYER, ids[row, seen // size], seen % size]
                    scores = SCALE * (q_latent[row, j] @ keys.T + q_rope[row, j] @ rotated.T)
                    weights = np.exp(scores - scores.max(-1, keepdims=True))
                    out[row, j] = weights / weights.sum(-1, keepdims=True) @ keys
        return out

    def attend(self, num_parts=3, backend="mosaic"):
        """By XLA; or by the kernel that the table chooses, interpreted: in that many parts, if rows are split."""
        starts, lengths = jnp.array(self.starts, jnp.int32), jnp.array(self.lengths, jnp.int32)
        where = (jnp.int32(LAYER), self.ids, starts, lengths)
        run = jax.jit(functools.partial(self._run, num_parts if backend == "mosaic" else None))
        return np.asarray(run(self.arrays, where, self.masks).astype(jnp.float32))

    def _run(self, num_parts, arrays, where, masks):
        options = {**masks, "sliding_window": self.window}
        if num_parts is None:
            return paged_mla(*arrays, *where, SCALE, self.first, **options, backend="xla")
        rows, size = arrays[0].shape[1] * arrays[0].shape[2], arrays[2].shape[2]
        config = tile_config(rows, size, str(arrays[2].dtype))
        parts = None if config.num_parts(rows) is None else num_parts
        options["splits"] = make_splits(*where[2:], parts, config.block_tokens, self.first, self.window)
        options["interpret"] = compat.interpret_params()
        return mosaic.paged_mla_mosaic(*arrays, *where, SCALE, self.first, **options)

    def error(self, got):
        """The largest difference of the queries that count, in units in the last place of the largest value.

        bfloat16 weights and outputs: half a unit each, and some for products in another order.
        """
        want = self.expected()
        unit = 2.0 ** (np.floor(np.log2(np.abs(want).max())) - 7)
        differences = (np.abs(got[r, :n] - want[r, :n]).max(initial=0) for r, n in enumerate(self.lengths))
        return max(differences) / unit

    def check(self, num_parts=3, backend="mosaic"):
        """The result is the float64 one."""
        got = self.attend(num_parts, backend)
        assert self.error(got) <= 1
        idle = [row for row, length in enumerate(self.lengths) if length == 0]
        assert (got[idle] == 0).all(), "a row without queries gives zeros"
        assert np.isfinite(got).all(), "queries that do not count stay finite"
