"""The FP8 KV cache: its numbers against ml_dtypes and NumPy, its ops against the unquantized ones, and the engine."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixtures import SOFT_NOISE, rnd_config, write_cyc, write_rnd
from test_config import RELEASED
from test_latent_append_mosaic import EPS, PAGES, SIZE, fp8_scene

from jaxspec import LLM, KVCache, ModelConfig, Placement, SamplingParams, SpeculativeConfig, apply_head, forward, load
from jaxspec.cache.kv_cache import bytes_per_token, copy_page
from jaxspec.engine import llm as llm_module
from jaxspec.engine.options import EngineConfig
from pallas_kernels import fp8
from pallas_kernels.latent_append import latent_append, norm_rope, norm_rope_append
from pallas_kernels.paged_mla import paged_mla

QUANTIZE = jax.jit(fp8.quantize)
FORWARD = jax.jit(forward, static_argnames="config")
WIDE = {"kv_lora_rank": 256, "num_hidden_layers": 2, "first_k_dense_replace": 0}  # two blocks a latent


def bits(x):
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


def oracle(latent):
    """Codes and scales by frexp and ml_dtypes."""
    blocks = np.asarray(latent, np.float64).reshape(*latent.shape[:-1], -1, 128)
    fraction, exponent = np.frexp(np.clip(np.abs(blocks).max(-1), 1e-9, 1e9) / 448)
    scale = np.clip(np.ldexp(1.0, exponent - (fraction == 0.5)), 2.0**-15, 2.0**7)
    codes = np.clip(blocks / scale[..., None], -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return codes.reshape(latent.shape), scale.astype(np.float32)


def hard_values():
    """Blocks of every magnitude; all codes, what lies between two of them and next to that; zeros; infinities."""
    rng = np.random.default_rng(0)
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (codes[1:] + codes[:-1]) / 2
    near = [np.nextafter(ties, np.float32(x)) for x in (-np.inf, np.inf)]
    rows = [np.resize(x, 128) * rng.choice([-1, 1], 128) for x in (codes, ties, *near)]
    for row in rows:
        row[0] = 448  # a scale of one
    sized = rng.normal(size=(300, 128)) * 2.0 ** rng.integers(-40, 40, (300, 1))
    edges = [
        np.full(128, 448 * 2.0**e * (1 + ulps * 2.0**-23)) for e in (-16, -15, -3, 0, 7, 8) for ulps in (-1, 0, 1)
    ]
    others = [np.zeros(128), np.full(128, 1e-45), np.full(128, 3.4e38), np.r_[np.inf, -np.inf, np.ones(126)]]
    return np.stack([*rows, *sized, *edges, *others]).astype(np.float32)


def test_quantize_is_the_oracle_bit_by_bit():
    values = hard_values()
    expected = oracle(values)
    got, scale = QUANTIZE(values.reshape(1, -1))
    np.testing.assert_array_equal(np.asarray(scale)[0], expected[1][:, 0])
    np.testing.assert_array_equal(bits(got)[0], bits(expected[0]).ravel())


def test_scales_are_the_least_powers_of_two_that_hold_their_blocks():
    values = hard_values()[:-1]
    scale = np.asarray(QUANTIZE(values)[1])[:, 0].astype(np.float64)
    amax = np.abs(values).max(-1)
    assert (np.frexp(scale)[0] == 0.5).all()
    assert scale.min() == 2.0**-15
    assert scale.max() == 2.0**7
    assert ((amax <= 448 * scale) | (scale == 2.0**7)).all()
    assert ((amax > 448 * scale / 2) | (scale == 2.0**-15)).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_dequantized_latents_are_exact_in_sixteen_bits(dtype):
    codes = np.resize(np.arange(256, dtype=np.uint8), (23, 2, 128)).view(ml_dtypes.float8_e4m3fn)
    scales = np.broadcast_to(2.0 ** np.arange(-15, 8, dtype=np.float32)[:, None, None], (23, 2, 1))
    values = np.asarray(fp8.dequantize(jnp.asarray(codes), jnp.asarray(scales)))
    np.testing.assert_array_equal(values, codes.astype(np.float32) * scales)
    finite = np.isfinite(values)
    assert finite.sum() == 23 * 254
    np.testing.assert_array_equal(values.astype(dtype).astype(np.float32)[finite], values[finite])


def test_the_error_is_half_a_step_of_the_code():
    values = np.random.default_rng(1).normal(size=(64, 512)).astype(np.float32)
    error = np.abs(np.asarray(fp8.dequantize(*QUANTIZE(values))) - values)
    scale = np.repeat(np.asarray(QUANTIZE(values)[1]), 128, -1)
    assert (error <= np.maximum(np.abs(values) / 16, scale * 2.0**-10)).all()
    assert error.max() > 0.01


def test_finite_values_never_become_nan_and_nan_stays_in_its_token():
    values = hard_values()[:-1].copy()
    assert np.isfinite(np.asarray(fp8.dequantize(*QUANTIZE(values)))).all()
    before = QUANTIZE(values)
    values[5, 3] = np.nan
    after = QUANTIZE(values)
    others = np.arange(len(values)) != 5
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(bits(old)[others], bits(new)[others])
    assert np.flatnonzero(np.isnan(np.asarray(after[0][5], np.float32))).tolist() == [3]
    assert np.isfinite(after[1]).all()


@pytest.mark.parametrize(("dtype", "multiplier"), [(jnp.bfloat16, 1.0), (jnp.bfloat16, 2.3), (jnp.float32, 1.0)])
def test_append_quantizes_what_the_plain_op_stores(dtype, multiplier):
    args = fp8_scene([[8, 9, 20], [30, 31, 48]], dtype)
    fixed = {"eps": EPS, "interleave": True, "multiplier": multiplier}
    pools = jax.jit(lambda given: norm_rope_append(**given, **fixed))(args)
    plain = {n: jnp.zeros(args[n].shape, dtype) for n in ("latent_pool", "rope_pool")}
    given = {n: x for n, x in args.items() if n != "scale_pool"} | plain
    latent, rope = jax.jit(lambda given: norm_rope_append(**given, **fixed))(given)
    place = 1, np.asarray(args["slots"]) // SIZE, np.asarray(args["slots"]) % SIZE
    written = (*oracle(np.asarray(latent[place], np.float32)), rope[place].astype(jnp.bfloat16))
    names, stored = ("latent_pool", "scale_pool", "rope_pool"), (pools[0], pools[2], pools[1])
    for name, pool, values in zip(names, stored, written, strict=True):
        expected = np.array(args[name])
        by_slot = expected.swapaxes(-1, -2) if name == "scale_pool" else expected
        by_slot[place] = values
        np.testing.assert_array_equal(bits(pool), bits(expected))


def test_the_bare_append_and_the_fused_one_agree():
    args = fp8_scene([[8, 9, 0], [30, 0, 0]], jnp.float32)
    fused = jax.jit(lambda given: norm_rope_append(**given, eps=EPS))(args)
    computed = jax.jit(norm_rope, static_argnums=(3, 4, 5))(*(args[n] for n in list(args)[4:7]), EPS, True, 1.0)
    place = (args[n] for n in ("latent_pool", "rope_pool", "layer", "slots"))
    bare = jax.jit(latent_append)(*place, *computed, args["scale_pool"])
    for x, y in zip(fused, bare, strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"scale_pool": None}, "scale_pool: got None, expected an array beside float8_e4m3fn latents"),
        (
            lambda a: {"latent_pool": a["latent_pool"].astype(jnp.bfloat16)},
            "scale_pool: got bfloat16 latents 512 wide",
        ),
        (lambda a: {"scale_pool": a["scale_pool"][1:]}, f"of shape (2, {PAGES}, 4, {SIZE}), expected"),
        (lambda a: {"scale_pool": a["scale_pool"].astype(jnp.bfloat16)}, "with bfloat16 scales"),
    ],
)
def test_pools_that_do_not_belong_together_are_refused(unchecked_annotations, change, message):
    args = fp8_scene([[8]])
    args |= change(args)
    with pytest.raises(ValueError, match=re.escape(message)):
        norm_rope_append(**args, eps=EPS)
    queries = jnp.zeros((1, 1, 2, 512)), jnp.zeros((1, 1, 2, 64))
    where = jnp.int32(0), jnp.ones((1, 2), jnp.int32), jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_mla(*queries, args["latent_pool"], args["rope_pool"], *where, 0.1, scale_pool=args["scale_pool"])


def attention_scene():
    """Two rows of 9 and 14 positions in scattered pages; pools full of NaN where they own nothing, and clean ones."""
    rng = np.random.default_rng(3)
    ids, ends = rng.permutation(np.arange(1, 13)).reshape(2, 6).astype(np.int32), np.array([9, 14])
    latent, scale = oracle(rng.normal(size=(2, 13, 4, 256)) * 2.0 ** rng.integers(-6, 6, (2, 13, 4, 1)))
    rope = rng.normal(size=(2, 13, 4, 16)).astype(ml_dtypes.bfloat16)
    owned = np.zeros((2, 13, 4, 1), bool)
    for row, end in enumerate(ends):
        for position in range(end):
            owned[1, ids[row, position // 4], position % 4] = True
    poisoned = [np.where(owned, pool, np.array(np.nan, pool.dtype)) for pool in (latent, rope, scale)]
    poisoned[2] = poisoned[2].swapaxes(-1, -2)
    queries = [rng.normal(size=(2, 3, 4, w)).astype(np.float32) for w in (256, 16)]
    where = jnp.int32(1), jnp.asarray(ids), jnp.asarray(ends - [1, 3], jnp.int32), jnp.asarray([1, 3], jnp.int32)
    return queries, (latent, rope, scale.swapaxes(-1, -2)), poisoned, where


def widened(latent, scale):
    """The latents in float32."""
    return latent.astype(np.float32) * np.repeat(scale.swapaxes(-1, -2), 128, -1)


def test_attention_is_that_over_the_dequantized_pool_whatever_others_hold():
    queries, (latent, rope, scale), poisoned, where = attention_scene()
    attend = jax.jit(functools.partial(paged_mla, scale=0.1))
    wide = widened(latent, scale)
    expected = np.asarray(attend(*queries, jnp.asarray(wide), jnp.asarray(rope), *where))
    for pools in ((latent, rope, scale), poisoned):
        got = np.asarray(attend(*queries, *map(jnp.asarray, pools[:2]), *where, scale_pool=jnp.asarray(pools[2])))
        np.testing.assert_array_equal(got, expected)
    halved = scale / 2
    other = attend(*queries, jnp.asarray(latent), jnp.asarray(rope), *where, scale_pool=jnp.asarray(halved))
    assert np.abs(np.asarray(other) - expected).max() > 0.1


def test_attention_in_bfloat16_dequantizes_exactly():
    queries, (latent, rope, scale), _, where = attention_scene()
    attend = jax.jit(functools.partial(paged_mla, scale=0.1))
    queries = [jnp.asarray(q, jnp.bfloat16) for q in queries]
    wide = jnp.asarray(widened(latent, scale), jnp.bfloat16)
    expected = attend(*queries, wide, jnp.asarray(rope), *where)
    got = attend(*queries, jnp.asarray(latent), jnp.asarray(rope), *where, scale_pool=jnp.asarray(scale))
    np.testing.assert_array_equal(bits(got), bits(expected))


# --- The cache ----------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_pools():
    config = ModelConfig.from_hf(RELEASED["R1"])
    layers = config.num_cached_layers
    assert bytes_per_token(config, fp8.DTYPE) == layers * 656
    assert bytes_per_token(config, jnp.bfloat16) == layers * 1152
    cache = jax.eval_shape(lambda: KVCache.create(config, 7, 64, fp8.DTYPE))
    assert [str(pool.dtype) for pool in jax.tree.leaves(cache)] == ["float8_e4m3fn", "bfloat16", "float32"]
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) == 7 * 64 * layers * 656


def test_the_same_memory_holds_three_quarters_more_pages():
    config, spec = ModelConfig.from_hf(RELEASED["R1"]), SpeculativeConfig(num_speculative_tokens=3)
    options = {"max_model_len": 1024, "page_size": 64, "kv_cache_memory_bytes": 2**32}
    plain, quantized = (
        EngineConfig(**options, kv_cache_dtype=x).pool_pages(config, spec, "bfloat16") for x in ("auto", "fp8")
    )
    assert quantized == 2**32 // (64 * config.num_cached_layers * 656)
    assert quantized / plain == pytest.approx(1152 / 656, rel=1e-3)


def test_a_copied_page_is_copied_in_every_pool():
    config = ModelConfig.from_hf(rnd_config(**WIDE))
    cache = KVCache.create(config, 5, 4, fp8.DTYPE, jnp.float32)
    filled = jax.tree.map(lambda pool: pool.at[:, 2].set(3), cache)
    copied = copy_page(filled, jnp.int32(2), jnp.int32(4))
    assert copied.compute_dtype == jnp.float32
    for pool in jax.tree.leaves(copied):
        pages = np.asarray(pool, np.float32)
        assert (pages[:, [2, 4]] == 3).all()
        assert (pages[:, [0, 1, 3]] == 0).all()


def test_latents_that_do_not_divide_into_blocks_are_refused():
    config = ModelConfig.from_hf(rnd_config())
    with pytest.raises(ValueError, match="kv_lora_rank: got 32, expected a multiple of 128 for an FP8 KV cache"):
        KVCache.create(config, 5, 4, fp8.DTYPE)


# --- The model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("fp8")
    made = {"dense": write_rnd(root / "dense", **WIDE | {"first_k_dense_replace": 2})}
    return made | {
        "rnd": write_rnd(root / "rnd", **WIDE),
        "soft": write_cyc(root / "soft", "mix", SOFT_NOISE, **WIDE),
    }


def paged_logits(model, steps, *pool):
    """Logits of 24 tokens, cached in steps of these widths; every slot that is not theirs is NaN in every pool."""
    config, params = model
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 128, (1, 24)), jnp.int32)
    ids = jnp.asarray([[5, 2, 7, 3, 6, 1]], jnp.int32)
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), KVCache.create(config, 9, 4, *pool))
    logits, start = [], 0
    for width in steps:
        positions = start + np.arange(width)
        window = ids[:, positions // 4] * 4 + (positions % 4)[None]
        placement = Placement(ids, jnp.full(1, start, jnp.int32), jnp.full(1, width, jnp.int32), window)
        hidden, cache = FORWARD(params, config, tokens[:, start : start + width], cache, placement)
        assert hidden.dtype == jnp.float32
        logits.append(np.asarray(apply_head(params, hidden)))
        start += width
    return np.concatenate(logits, 1)


def test_logits_are_close_to_the_plain_caches(folders):
    """A code has 3 bits of fraction: a latent is off by up to 1/16, by 1/40 in the root mean square.

    Attention averages that over positions and columns, and two layers add theirs to logits of order one. Without
    experts, whose choice may tip.
    """
    model = load(folders["dense"])
    plain = paged_logits(model, [24], jnp.float32)
    quantized = paged_logits(model, [24], fp8.DTYPE, jnp.float32)
    error = np.abs(quantized - plain)
    assert 1e-3 < error.max() < 0.15 * plain.std()
    assert np.sqrt((error**2).mean()) < 0.03 * plain.std()
    by_steps = paged_logits(model, [7, 1, 4, 4, 4, 4], fp8.DTYPE, jnp.float32)
    np.testing.assert_allclose(
        by_steps, quantized, atol=2e-3
    )  # a sum in another order may tip a code to its neighbour


def test_a_bfloat16_cache_beside_float32_activations(folders):
    model = load(folders["dense"])
    error = paged_logits(model, [24], jnp.bfloat16, jnp.float32) - paged_logits(model, [24], jnp.float32)
    assert 1e-5 < np.abs(error).max() < 0.03


# --- The engine ---------------------------------------------------------------------------------------------------

OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "page_size": 4,
    "kv_cache_dtype": "fp8",
}
PROMPTS = [[3], [40, 7, 9, 22, 1, 2, 3, 60, 61, 5, 6, 7, 8], [40, 7, 9, 22, 1, 2, 3, 60, 61, 5, 6, 7, 9], [5] * 16]
PARAMS = SamplingParams(temperature=0.0, max_tokens=20)


def generate(folder, num_drafts, *, rounds=1, options=OPTIONS, **others):
    engine_config = {"row_buckets": (), "chunk_buckets": ((4, 16),), "rounds_per_dispatch": 1} | others
    llm = LLM(
        folder, speculative_config={"num_speculative_tokens": num_drafts}, engine_config=engine_config, **options
    )
    outputs = [llm.generate(PROMPTS, PARAMS) for _ in range(rounds)]
    return llm, [[output.outputs[0].token_ids for output in batch] for batch in outputs]


@pytest.fixture(scope="module")
def without_drafts(folders):
    return generate(folders["rnd"], 0, enable_prefix_caching=False)[1][0]


def test_greedy_tokens_are_those_of_the_model_over_the_same_cache(folders, without_drafts):
    """Not of the plain cache: the logits of one prompt, one token at a time, by `forward` alone."""
    config, params = load(folders["rnd"])
    tokens = list(PROMPTS[1])
    ids = jnp.arange(1, 17)[None]
    cache, start = KVCache.create(config, 17, 4, fp8.DTYPE, jnp.float32), 0
    while len(tokens) < len(PROMPTS[1]) + 20:
        width = len(tokens) - start
        positions = start + np.arange(width)
        window = ids[:, positions // 4] * 4 + (positions % 4)[None]
        placement = Placement(ids, jnp.full(1, start, jnp.int32), jnp.full(1, width, jnp.int32), window)
        hidden, cache = FORWARD(params, config, jnp.asarray([tokens[start:]], jnp.int32), cache, placement)
        start = len(tokens)
        tokens.append(int(apply_head(params, hidden[:, -1:]).argmax()))
    assert tokens[len(PROMPTS[1]) :] == without_drafts[1]


@pytest.mark.parametrize("num_drafts", [3])
def test_greedy_tokens_are_the_same_for_every_draft_length(folders, without_drafts, num_drafts):
    assert generate(folders["rnd"], num_drafts)[1] == [without_drafts]


def test_greedy_tokens_are_the_same_from_the_prefix_cache(folders, without_drafts):
    llm, found = generate(folders["rnd"], 3, rounds=2)
    assert found == [without_drafts] * 2
    assert llm.get_metrics().prefix_cache_hits > 30
    cache = llm._engine._device.serving.state.cache
    assert [str(pool.dtype) for pool in jax.tree.leaves(cache)] == ["float8_e4m3fn", "bfloat16", "float32"]


def test_drafts_are_accepted_from_an_fp8_cache(folders):
    llm, [found] = generate(folders["soft"], 2)
    assert found == [[(prompt[-1] + i) % 64 for i in range(1, 21)] for prompt in PROMPTS]
    assert 2 < llm.get_metrics().mean_acceptance_length < 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_lora_rank: got 32, expected a multiple of 128 for an FP8 KV cache"),
        (
            {"kv_cache_dtype": "fp4"},
            "kv_cache_dtype: got 'fp4', expected one of ['auto', 'bfloat16', 'float32', 'fp8', 'fp8_e4m3']",
        ),
        ({"kv_cache_dtype": ["fp8"]}, "kv_cache_dtype: got ['fp8'], expected one of"),
        (
            {"engine_config": {"attention_backend": "triton"}},
            "attention_backend: got 'triton', expected one of ['auto', 'mosaic', 'xla']",
        ),
        (
            {"engine_config": {"attention_backend": "mosaic"}},
            "attention_backend: got 'mosaic', but it needs a Hopper GPU (sm_90): got cpu; 'auto' takes what there is",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_options_that_cannot_be_are_refused_before_weights_are_read(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(llm_module, "load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        LLM(write_rnd(tmp_path / "rnd"), **options)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("auto", "float16"), ("bfloat16", "bfloat16"), ("float32", "float32"), ("fp8_e4m3", "float8_e4m3fn")],
)
def test_names_of_dtypes(name, expected):
    assert EngineConfig(max_model_len=8, kv_cache_dtype=name).pool_dtype("float16") == jnp.dtype(expected)
