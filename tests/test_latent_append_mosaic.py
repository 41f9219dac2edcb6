"""The fused append kernel, run by the interpreter, against NumPy in float32; and the op's choice of backends.

In FP8 it is against the XLA op, bit by bit, which test_fp8_cache.py holds against NumPy.
"""

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.primitives import apply_rope, rms_norm
from pallas_kernels.compat import interpret_params, reset_interpreter
from pallas_kernels.latent_append import latent_append, mosaic, norm_rope_append

LAYERS, PAGES, SIZE, WIDTH, ROPE, EPS = 3, 7, 8, 512, 64, 1e-6
NAMES = ("latent_pool", "rope_pool", "layer", "slots", "projected", "norm_weight", "angles")


def scene(slots, dtype=jnp.bfloat16, seed=0, width=WIDTH):
    """Arguments of the op: pools of values the op must keep, some NaN; a projection of large and small tokens."""
    rng = np.random.default_rng(seed)
    slots = np.asarray(slots, np.int32)
    pools = [rng.normal(size=(LAYERS, PAGES, SIZE, w)) for w in (width, ROPE)]
    for pool in pools:
        pool[rng.random(pool.shape[:3]) < 0.3] = np.nan
    size = 10.0 ** rng.integers(-2, 3, (*slots.shape, 1))
    turns = rng.uniform(0, 1e4, (*slots.shape, ROPE // 2))
    arrays = (
        *(jnp.asarray(pool, dtype) for pool in pools),
        jnp.int32(1),
        jnp.asarray(slots),
        jnp.asarray(size * rng.normal(size=(*slots.shape, width + ROPE)), dtype),
        jnp.asarray(rng.normal(size=width), dtype),
        jnp.asarray(np.stack([np.cos(turns), np.sin(turns)], axis=-2), jnp.float32),
    )
    return dict(zip(NAMES, arrays, strict=True))


def values(args, interleave=True, multiplier=1.0):
    """What the op must store for each token: NumPy, without the op's intermediate rounding."""
    projected, weight, angles = (np.asarray(args[n], np.float32) for n in ("projected", "norm_weight", "angles"))
    latent, key = projected[..., : len(weight)], projected[..., len(weight) :]
    latent = latent / np.sqrt((latent**2).mean(-1, keepdims=True) + EPS) * weight * multiplier
    first, second = (key[..., ::2], key[..., 1::2]) if interleave else np.split(key, 2, -1)
    turned = (first + 1j * second) * (angles[..., 0, :] + 1j * angles[..., 1, :])
    return latent, np.concatenate([turned.real, turned.imag], -1)


def append(args, interleave=True, multiplier=1.0, races=False, module=mosaic):
    """Runs the kernel by the interpreter, the layer index traced."""
    fixed = {"eps": EPS, "interleave": interleave, "multiplier": multiplier}
    fixed["interpret"] = interpret_params(detect_races=races)
    return jax.jit(lambda given: module.norm_rope_append_mosaic(**given, **fixed))(args)


def check(pools, args, interleave=True, multiplier=1.0):
    """The written slots hold the values; every other bit outside the layer's scratch page is as it was."""
    layer, slots = int(args["layer"]), np.asarray(args["slots"])
    counts = slots >= SIZE
    rounding = 2**-8 if args["projected"].dtype == jnp.bfloat16 else 1e-6
    latent, rope = values(args, interleave, multiplier)
    radius = np.tile(np.hypot(*np.split(rope, 2, -1)), 2)  # of each pair, to which its error is relative
    checked = (
        (pools[0], args["latent_pool"], latent, np.abs(latent) * rounding * (2 if multiplier == 1 else 4)),
        (pools[1], args["rope_pool"], rope, radius * rounding),
    )
    for pool, old, value, error in checked:
        assert pool.dtype == old.dtype
        expected = np.asarray(old).reshape(LAYERS, PAGES * SIZE, -1).copy()
        got = np.asarray(pool).reshape(expected.shape)
        written = got[layer, slots[counts]].astype(np.float32)
        assert (np.abs(written - value[counts]) <= 1.02 * error[counts]).all()
        expected[layer, slots[counts]] = got[layer, slots[counts]]
        if not counts.all():
            expected[layer, :SIZE] = got[layer, :SIZE]
        bits = f"u{expected.dtype.itemsize}"
        np.testing.assert_array_equal(got.view(bits), expected.view(bits))


@pytest.mark.parametrize(
    "slots",
    [
        [[9]],  # one token
        [[9], [55], [17]],  # T = 1
        [[8, 9, 10, 11], [30, 31, 48, 49]],  # T = 4, a row that crosses into another page
        np.random.default_rng(0).permutation(np.arange(SIZE, PAGES * SIZE))[:40].reshape(4, 10),  # a chunk
    ],
    ids=["1x1", "3x1", "2x4", "4x10"],
)
@pytest.mark.parametrize("interleave", [True, False])
def test_writes_its_values_and_nothing_else(slots, interleave):
    args = scene(slots)
    check(append(args, interleave, races=True), args, interleave)


@pytest.mark.parametrize("layer", [0, 2])
def test_the_layer_is_a_value(layer):
    args = scene([[8, 20]])
    args["layer"] = jnp.int32(layer)
    check(append(args, races=True), args)


@pytest.mark.parametrize(
    ("dtype", "width", "multiplier"), [(jnp.float32, 512, 1.0), (jnp.bfloat16, 384, 2.3), (jnp.float32, 128, 2.3)]
)
def test_other_dtypes_widths_and_multipliers(dtype, width, multiplier):
    args = scene([[8, 20, 31]], dtype, width=width)
    check(append(args, multiplier=multiplier, races=True), args, multiplier=multiplier)


def test_tokens_that_do_not_count_touch_scratch_alone():
    """Several write the same scratch slot, which is a race, and harmless."""
    args = scene([[12, 0, 0], [0, 0, 0], [3, 13, 0]])
    check(append(args), args)


def test_a_token_of_zeros_or_not_finite_stays_within_its_slots():
    args = scene([[12, 13, 14]])
    args["projected"] = args["projected"].at[0, 0].set(0).at[0, 2].set(jnp.nan)
    latent, rope = (np.asarray(pool, np.float32)[1, 1] for pool in append(args, races=True))
    assert (latent[4] == 0).all()
    assert (rope[4] == 0).all()
    assert np.isnan(latent[6]).all()
    assert np.isnan(rope[6]).all()
    args["slots"], args["projected"] = args["slots"][:, 1:2], args["projected"][:, 1:2]
    args["angles"] = args["angles"][:, 1:2]
    np.testing.assert_array_equal(append(args)[0][1, 1, 5], latent[5])


def test_in_a_scan_over_layers_with_the_pools_carried():
    args = scene([[8, 9], [40, 16]])

    def step(pools, layer):
        given = {**args, "latent_pool": pools[0], "rope_pool": pools[1], "layer": layer}
        return append(given), None

    pools, _ = jax.lax.scan(step, (args["latent_pool"], args["rope_pool"]), jnp.arange(2))
    args["layer"] = jnp.int32(0)
    first = append(args)
    args |= {"latent_pool": first[0], "rope_pool": first[1], "layer": jnp.int32(1)}
    check(pools, args)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: {"slots": a["slots"] + 1},
        lambda a: {"layer": a["layer"] + 1},
        lambda a: {"norm_weight": a["norm_weight"].at[511].multiply(1.1)},
        lambda a: {"projected": a["projected"].at[0, 0, 575].multiply(-1)},
        lambda a: {"angles": a["angles"][:, :, ::-1]},
        lambda a: {"rope_pool": a["rope_pool"].at[0, 0, 0, 0].add(1)},
    ],
    ids=["slots", "layer", "weight", "key", "angles", "elsewhere"],
)
def test_the_check_sees_a_wrong_operand(change):
    args = scene([[8, 9], [40, 16]])
    args = {**args, **{n: jnp.nan_to_num(args[n]) for n in ("latent_pool", "rope_pool")}}
    check(append(args), args)
    with pytest.raises(AssertionError):
        check(append({**args, **change(args)}), args)


MUTANTS = {
    "layer 0 whatever is asked": ("place = (layer[0],", "place = (layer[0] * 0,"),
    "offset taken for the page": ("lax.div(slot, jnp.int32(page_size))", "lax.rem(slot, jnp.int32(page_size))"),
    "mean over the key as well": ("/ width + eps", "/ (width + 64) + eps"),
    "no epsilon": ("/ width + eps", "/ width"),
    "not normalised": ("round_(x * scale)", "round_(x)"),
    "rotated backwards": (
        "first * cos - second * sin, second * cos + first",
        "first * cos + second * sin, second * cos - first",
    ),
    "pairs half a width apart": ("if interleave:", "if False:"),
    "halves swapped": ("pl.ds(i * PAIRS, PAIRS))]", "pl.ds((1 - i) * PAIRS, PAIRS))]"),
    "key not stored": ("for i, half in enumerate(rotated)", "for i, half in enumerate(rotated[:1])"),
    "one token too few": ('{"token": tokens}', '{"token": tokens - 1}'),
}


def mutate(old, new):
    """The kernel's module with one text replaced by another."""
    source = Path(mosaic.__file__).read_text()
    assert source.count(old) == 1
    mutated = types.ModuleType("mutated")
    exec(source.replace(old, new), mutated.__dict__)
    return mutated


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_check_sees_a_wrong_kernel(mutant):
    args = scene([[8, 9], [40, 16]])
    args["projected"] = args["projected"] * 1e-3  # so that the epsilon counts
    check(append(args), args)
    with pytest.raises(AssertionError):
        check(append(args, module=mutate(*MUTANTS[mutant])), args)


def test_the_interpreter_sees_two_tokens_in_one_slot():
    try:
        with pytest.raises(Exception, match=r"(?i)race"):
            jax.block_until_ready(append(scene([[9, 9]]), races=True))
    finally:
        reset_interpreter()


@pytest.mark.parametrize("interleave", [True, False])
def test_in_xla_it_is_norm_rope_and_append_bit_by_bit(interleave):
    args = scene([[8, 0], [40, 16]])
    got = jax.jit(lambda a: norm_rope_append(**a, eps=EPS, interleave=interleave, multiplier=2.3))(args)

    def separately(latent_pool, rope_pool, layer, slots, projected, norm_weight, angles):
        latent, key = jnp.split(projected, [WIDTH], axis=-1)
        latent = rms_norm(latent, norm_weight, EPS) * 2.3
        return latent_append(latent_pool, rope_pool, layer, slots, latent, apply_rope(key, angles, interleave))

    for x, y in zip(got, jax.jit(lambda a: separately(**a))(args), strict=True):
        np.testing.assert_array_equal(*(np.asarray(pool).view(np.uint16) for pool in (x, y)))
    check(got, args, interleave, multiplier=2.3)


def test_a_backend_that_cannot_says_why():
    args = scene([[8]])
    with pytest.raises(
        NotImplementedError, match=r"norm_rope_append cannot: it needs a Hopper GPU \(sm_90\): got cpu"
    ):
        norm_rope_append(**args, eps=EPS, backend="mosaic")
    with pytest.raises(ValueError, match="unknown backend: got 'triton'"):
        norm_rope_append(**args, eps=EPS, backend="triton")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda a: {"norm_weight": a["norm_weight"].astype(jnp.float32)},
            "got bfloat16, bfloat16, bfloat16, float32",
        ),
        (lambda a: {"latent_pool": a["latent_pool"][..., :500]}, "multiple of 128: got 500"),
        (lambda a: {"rope_pool": a["rope_pool"][..., :32]}, "64 wide: got 32"),
    ],
)
def test_the_kernel_says_what_it_cannot_take(change, reason):
    args = scene([[8]])
    args |= change(args)
    given = (args[n] for n in ("latent_pool", "rope_pool", "projected", "norm_weight"))
    assert reason in mosaic.unsupported(*given)


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("rope_pool", np.s_[:2], r"rope_pool .* got \(2, 7, 8, 64\), expected \(3, 7, 8, 64\)"),
        ("projected", np.s_[..., 1:], r"projected .* got \(1, 2, 575\), expected \(1, 2, 576\)"),
        ("angles", np.s_[:, :1], r"angles .* got \(1, 1, 2, 32\), expected \(1, 2, 2, 32\)"),
        ("norm_weight", np.s_[1:], r"norm_weight .* got \(511,\), expected \(512,\)"),
        ("layer", np.s_[None], r"layer .* got \(1,\), expected \(\)"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(unchecked_annotations, name, part, message):
    args = scene([[8, 9]])
    args[name] = args[name][part]
    with pytest.raises(ValueError, match=message):
        norm_rope_append(**args, eps=EPS)


def fp8_scene(slots, dtype=jnp.bfloat16, width=WIDTH):
    """A scene with FP8 pools of any bytes, NaN among them."""
    args = scene(slots, dtype, width=width)
    rng = np.random.default_rng(1)
    latent = rng.integers(0, 256, args["latent_pool"].shape, np.uint8)
    args["latent_pool"] = jnp.asarray(latent).view(jnp.float8_e4m3fn)
    args["rope_pool"] = args["rope_pool"].astype(jnp.bfloat16)
    scales = rng.normal(size=(*latent.shape[:2], width // 128, SIZE)).astype(np.float32)
    args["scale_pool"] = jnp.asarray(np.where(scales < -1, np.nan, scales))
    return args


def fp8_check(pools, args, interleave=True, multiplier=1.0):
    """Every pool's bits are the XLA op's, outside the layer's scratch page, and NaN is NaN."""
    fixed = {"eps": EPS, "interleave": interleave, "multiplier": multiplier, "backend": "xla"}
    expected = jax.jit(lambda given: norm_rope_append(**given, **fixed))(args)
    assert len(pools) == len(expected) == 3
    for pool, other in zip(pools, expected, strict=True):
        assert pool.dtype == other.dtype
        got, wanted = (np.array(x) for x in (pool, other))
        if not (np.asarray(args["slots"]) >= SIZE).all():
            got[int(args["layer"]), 0] = wanted[int(args["layer"]), 0] = 0
        for x in (got, wanted):
            x[np.isnan(x)] = np.nan
        bits = f"u{got.dtype.itemsize}"
        np.testing.assert_array_equal(got.view(bits), wanted.view(bits))


@pytest.mark.parametrize(
    ("slots", "dtype", "width", "interleave", "multiplier"),
    [
        ([[8, 9, 10, 11], [30, 31, 48, 49]], jnp.bfloat16, 512, True, 1.0),
        ([[55, 17]], jnp.float32, 512, False, 2.3),
        ([[9, 20, 33]], jnp.bfloat16, 1024, False, 2.3),
    ],
)
def test_fp8_is_the_xla_op_bit_by_bit(slots, dtype, width, interleave, multiplier):
    args = fp8_scene(slots, dtype, width)
    fp8_check(append(args, interleave, multiplier, races=True), args, interleave, multiplier)


def test_fp8_tokens_of_zeros_not_finite_or_far_too_large_stay_within_their_slots():
    args = fp8_scene([[12, 13, 14, 15]])
    args["projected"] = args["projected"].at[0, 0].set(0).at[0, 2].set(jnp.nan)
    args["norm_weight"] = args["norm_weight"].at[7].set(1e6)
    pools = append(args, races=True)
    fp8_check(pools, args)
    latent, scale = np.asarray(pools[0], np.float32)[1, 1, 4:8], np.asarray(pools[2])[1, 1, :, 4:8]
    assert (latent[0] == 0).all()
    assert (scale[:, 0] == 2.0**-15).all()
    assert np.isnan(latent[2]).all()
    assert (np.abs(latent[[1, 3], 7]) == 448).all()
    assert (scale[0, [1, 3]] == 128).all()


def test_fp8_tokens_that_do_not_count_touch_scratch_alone():
    args = fp8_scene([[12, 0, 0], [0, 0, 0], [3, 13, 0]])
    fp8_check(append(args), args)


FP8_MUTANTS = {
    "scale not stored": ("_store(scale_pool[0].at[(*place[:2], slice(None), place[2])], block_scale)", "pass"),
    "quantized before it is rounded": ("_quantize(round_(latent))", "_quantize(latent * 1.001)"),
    "the scale of another block": ("return fp8.round_to_fp8", "inverse = inverse[::-1]; return fp8.round_to_fp8"),
    "one scale for all blocks": (
        "jnp.max(fp8.magnitude(latent), axis=1)",
        "four(jnp.max(fp8.magnitude(latent)))",
    ),
    "scales of another layer": ("scale_pool[0].at[(*place[:2],", "scale_pool[0].at[(0, place[1],"),
    "latents of another layer": ("_store(latent_pool.at[place], latent)", "_store(latent_pool.at[0, 1, 1], latent)"),
}


@pytest.mark.parametrize("mutant", FP8_MUTANTS)
def test_the_check_sees_a_wrong_fp8_kernel(mutant):
    args = fp8_scene([[8, 9], [40, 16]])
    fp8_check(append(args), args)
    mutated = mutate(*FP8_MUTANTS[mutant])
    mutated.four = lambda x: jnp.broadcast_to(x, 4)
    with pytest.raises(AssertionError):
        fp8_check(append(args, module=mutated), args)
