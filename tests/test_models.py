"""The cache-free model against transformers', through the reader that users run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fixtures import SOFT_NOISE, YARN, write_cyc, write_rnd
from oracles import greedy_reference, hugging_face_model, reference_logits
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from jaxspec.checkpoint import load
from jaxspec.config import ModelConfig, RopeConfig, YarnConfig
from jaxspec.models.dense import dense_forward
from jaxspec.models.params import MLP, MoE
from jaxspec.models.primitives import rope_frequencies, route

forward = jax.jit(dense_forward, static_argnums=1)

# The three settings of the two YaRN corrections, with the factors on cos and sin and on the softmax.
YARN_CASES = {
    "both 0.707": (0.707, 0.707, 1.0, 1.590),
    "both 1": (1.0, 1.0, 1.0, 1.874),
    "1 and 0.707": (1.0, 0.707, 1.086, 1.590),
}
VARIANTS = {
    "plain": {},
    "grouped router": {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "plain weights, two shared experts": {"norm_topk_prob": False, "n_shared_experts": 2},
    "uncompressed queries": {"q_lora_rank": None},
    "half-split rope": {"rope_interleave": False},
    "attention bias": {"attention_bias": True},
    "attention bias, uncompressed queries": {"attention_bias": True, "q_lora_rank": None},
    "tied embeddings": {"tie_word_embeddings": True},
    "unequal head widths": {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20},
    "large epsilon": {"rms_norm_eps": 0.1},
    "three MTP modules": {"num_nextn_predict_layers": 3},
    "dense layers alone": {"first_k_dense_replace": 3, "num_nextn_predict_layers": 0},
    "no dense layer": {"first_k_dense_replace": 0},
} | {
    f"YaRN, {name}": {"rope_scaling": YARN | {"mscale": mscale, "mscale_all_dim": all_dim}}
    for name, (mscale, all_dim, _, _) in YARN_CASES.items()
}


def random_tokens(shape: tuple[int, int], vocab_size: int = 128, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, shape)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_transformers(tmp_path, changes):
    path, tokens = write_rnd(tmp_path / "rnd", **changes), random_tokens((2, 24))
    config, params = load(path)
    ours = forward(params, config, jnp.asarray(tokens))
    logits, mtp_logits = reference_logits(path, tokens)
    np.testing.assert_allclose(ours.logits, logits, atol=1e-4, rtol=0)
    assert ours.mtp_logits.shape[0] == config.num_mtp_layers == len(mtp_logits)
    for depth, reference in enumerate(mtp_logits):
        meaningful = ours.mtp_logits[depth, :, : -depth - 1]
        np.testing.assert_allclose(meaningful, reference, atol=1e-4, rtol=0)


@pytest.mark.parametrize("changes", [{}, {"num_nextn_predict_layers": 3}], ids=["one module", "three modules"])
def test_oracles_agree_on_greedy_tokens(tmp_path, changes):
    path, prompt = write_rnd(tmp_path / "rnd", **changes), [3, 1, 4, 1, 5]
    config, params = load(path)
    tokens = greedy_reference(path, prompt, 10)
    assert len(tokens) == 10
    assert greedy_reference(path, prompt, 10, use_mtp=True) == tokens
    padded = np.pad([prompt + tokens], ((0, 1), (0, 9)))
    predicted = np.argmax(forward(params, config, jnp.asarray(padded)).logits[0], axis=-1)
    assert predicted[4:14].tolist() == tokens


def test_greedy_reference_stops_at_eos(tmp_path):
    path = write_cyc(tmp_path / "cyc", eos_token_id=[40, 14])
    assert greedy_reference(path, [9, 10], 8) == [11, 12, 13, 14]
    assert greedy_reference(path, [9, 10], 8, use_mtp=True) == [11, 12, 13, 14]


def test_padding_changes_no_logit(tmp_path):
    """Field log f3: pad tokens must take no expert's room."""
    config, params = load(write_rnd(tmp_path / "rnd"))
    tokens = random_tokens((1, 5))
    short, long = (forward(params, config, jnp.asarray(np.pad(tokens, ((0, 0), (0, n))))).logits for n in (3, 59))
    # Logits reach 5, and XLA sums in another order at another width.
    np.testing.assert_allclose(short[:, :5], long[:, :5], atol=5e-6, rtol=0)


def test_bfloat16_weights(tmp_path):
    path, tokens = write_rnd(tmp_path / "rnd", dtype="bfloat16"), random_tokens((2, 24))
    (config, stored), (_, cast) = load(path), load(path, dtype=jnp.float32)
    low, high = forward(stored, config, jnp.asarray(tokens)), forward(cast, config, jnp.asarray(tokens))
    logits, mtp_logits = reference_logits(path, tokens)
    np.testing.assert_allclose(high.logits, logits, atol=1e-4, rtol=0)
    np.testing.assert_allclose(high.mtp_logits[0, :, :-1], mtp_logits[0], atol=1e-4, rtol=0)
    assert low.hidden.dtype == jnp.bfloat16
    # A router's choice can flip on rounding, so the mean is compared and not the maximum.
    assert float(jnp.mean(jnp.abs(low.logits - high.logits))) < 0.05


# --- YaRN and rotary pairs (field log g7, g8) ---------------------------------------------------------------------


@pytest.mark.parametrize(("mscale", "all_dim", "cos_sin", "softmax"), YARN_CASES.values(), ids=YARN_CASES)
def test_yarn_corrections(tmp_path, mscale, all_dim, cos_sin, softmax):
    path = write_rnd(tmp_path / "rnd", rope_scaling=YARN | {"mscale": mscale, "mscale_all_dim": all_dim})
    config, _ = load(path)
    _, factor = rope_frequencies(config.rope, config.qk_rope_head_dim)
    assert factor == pytest.approx(cos_sin, abs=5e-4)
    assert config.softmax_scale * config.qk_head_dim**0.5 == pytest.approx(softmax, abs=5e-4)


@pytest.mark.parametrize(("all_dim", "scale"), [(1.0, 0.1352338), (0.707, 0.1147214)], ids=["V3", "V2"])
def test_softmax_scale_of_released_models(tmp_path, all_dim, scale):
    yarn = YARN | {"mscale": all_dim, "mscale_all_dim": all_dim, "original_max_position_embeddings": 4096}
    path = write_rnd(tmp_path / "rnd", qk_nope_head_dim=128, qk_rope_head_dim=64, rope_scaling=yarn)
    assert load(path)[0].softmax_scale == pytest.approx(scale, abs=1e-7)


RELEASED_YARN = {
    "V3": (10000.0, {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "V2": (10000.0, {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}),
    "Kimi-K2": (50000.0, {"factor": 32, "beta_fast": 1, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "no mscale": (10000.0, {"factor": 8}),
    "mscale alone": (10000.0, {"factor": 8, "mscale": 0.707}),
    "attention factor": (10000.0, {"factor": 8, "attention_factor": 1.25, "mscale": 1.0, "mscale_all_dim": 0.5}),
    "not truncated": (10000.0, {"factor": 8, "truncate": False}),
}


@pytest.mark.parametrize(("theta", "yarn"), RELEASED_YARN.values(), ids=RELEASED_YARN)
def test_rope_frequencies_equal_transformers(theta, yarn):
    yarn = yarn | {"original_max_position_embeddings": 4096}
    parameters = yarn | {"rope_type": "yarn", "rope_theta": theta}
    reference = DeepseekV3Config(qk_rope_head_dim=64, rope_parameters=parameters, max_position_embeddings=4096)
    expected, expected_factor = ROPE_INIT_FUNCTIONS["yarn"](reference)
    frequencies, factor = rope_frequencies(RopeConfig(theta=theta, yarn=YarnConfig(**yarn)), 64)
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=2e-6)
    assert factor == pytest.approx(expected_factor, rel=1e-6)


def test_wrong_rotary_pairing_would_show(tmp_path):
    """Field log g8. Both pairings are compared with transformers above; here, that the choice matters."""
    tokens = jnp.asarray(random_tokens((2, 24)))
    adjacent = forward(*reversed(load(write_rnd(tmp_path / "a"))), tokens).logits
    half_split = forward(*reversed(load(write_rnd(tmp_path / "b", rope_interleave=False))), tokens).logits
    np.testing.assert_allclose(adjacent[:, 0], half_split[:, 0], atol=1e-5, rtol=0)
    assert float(jnp.max(jnp.abs(adjacent - half_split)[:, 1:])) > 0.1


# --- Router (field log g9) ----------------------------------------------------------------------------------------


def router_of(weight: np.ndarray, bias: np.ndarray) -> MoE:
    """A block of which only the router is used. weight [hidden, experts]."""
    hidden, experts = weight.shape
    unused = MLP(jnp.zeros((experts, hidden, 1)), jnp.zeros((experts, hidden, 1)), jnp.zeros((experts, 1, hidden)))
    return MoE(jnp.asarray(weight, jnp.float32), jnp.asarray(bias, jnp.float32), unused, None)


@pytest.fixture
def router_config(tmp_path):
    def make(**changes) -> ModelConfig:
        return load(write_rnd(tmp_path / "router", **changes))[0]

    return make


def test_router_of_the_field_log(router_config):
    """Scores and bias given: the group score is a sum of two, masked groups lose to negative scores."""
    config = router_config(n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=2)
    scores = np.array([0.9, 0.05, 0.6, 0.6, 0.5, 0.5, 0.2, 0.2])
    moe = router_of(np.log(scores / (1 - scores))[None], np.full(8, -2.0))
    weights, experts = route(moe, config, jnp.ones((1, 1)))
    assert sorted(experts[0].tolist()) == [2, 3]
    np.testing.assert_allclose(weights[0], [1.25, 1.25], rtol=1e-6)


def test_router_bias_chooses_but_does_not_weigh(router_config):
    config = router_config(n_routed_experts=4, num_experts_per_tok=2, routed_scaling_factor=1.0)
    scores = np.array([0.8, 0.4, 0.2, 0.1])
    moe = router_of(np.log(scores / (1 - scores))[None], np.array([0.0, 0.0, 0.0, 5.0]))
    weights, experts = route(moe, config, jnp.ones((1, 1)))
    assert experts[0].tolist() == [3, 0]
    np.testing.assert_allclose(weights[0], [1 / 9, 8 / 9], rtol=1e-6)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (4, 1), (8, 3)])
@pytest.mark.parametrize("bias", [0.0, -2.0, 1.0])
def test_router_equals_transformers(router_config, groups, kept, bias, normalise):
    changes = {
        "n_routed_experts": 16,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": 2,
        "norm_topk_prob": normalise,
    }
    rng = np.random.default_rng(0)
    weight, biases = rng.standard_normal((12, 16)) / 3, bias + 0.2 * rng.standard_normal(16)
    x = rng.standard_normal((200, 12)).astype(np.float32)
    reference = DeepseekV3TopkRouter(DeepseekV3Config(hidden_size=12, routed_scaling_factor=2.5, **changes))
    with torch.no_grad():
        reference.weight.copy_(torch.as_tensor(weight.T))
        reference.e_score_correction_bias.copy_(torch.as_tensor(biases))
        _, expected_weights, expected_experts = reference(torch.as_tensor(x))
    weights, experts = route(router_of(weight, biases), router_config(**changes), jnp.asarray(x))
    ours, theirs = np.zeros((200, 16)), np.zeros((200, 16))
    np.put_along_axis(ours, np.asarray(experts), np.asarray(weights), axis=1)
    np.put_along_axis(theirs, expected_experts.numpy(), expected_weights.numpy(), axis=1)
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


# --- The checkpoints that fix acceptance --------------------------------------------------------------------------


def expected_drafts(drafts: str, fed: np.ndarray) -> np.ndarray:
    wrong = {"hit": False, "miss": True, "mix": fed % 4 == 3}[drafts]
    return (fed + 1 + wrong) % 64


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("noise", [0.0, SOFT_NOISE], ids=["CYC", "SOFT"])
@pytest.mark.parametrize("drafts", ["hit", "miss", "mix"])
def test_cyc_counts_and_drafts_as_told(tmp_path, drafts, noise, tied):
    """On random text, so for any context: the draft depends on the token fed alone, recycled or not."""
    config, params = load(write_cyc(tmp_path / "cyc", drafts, noise, tied=tied))
    tokens = random_tokens((4, 200), 64)
    out = forward(params, config, jnp.asarray(tokens))
    np.testing.assert_array_equal(np.argmax(out.logits, -1), (tokens + 1) % 64)
    fed = tokens[:, 1:]
    np.testing.assert_array_equal(np.argmax(out.mtp_logits[0, :, :-1], -1), expected_drafts(drafts, fed))
    # The half of eh_proj that would read the state below is zero: what is recycled into it does not matter.
    assert not np.any(params.mtp.eh_proj[:, config.hidden_size :])
    assert config.eos_token_ids == ()


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_soft_betrays_a_changed_context(tmp_path, tied):
    config, params = load(write_cyc(tmp_path / "soft", "hit", SOFT_NOISE, tied=tied))
    tokens = random_tokens((4, 200), 64)
    changed = tokens.copy()
    changed[:, 5] = (changed[:, 5] + 7) % 64
    one, other = (forward(params, config, jnp.asarray(x)) for x in (tokens, changed))
    for name in ("logits", "mtp_logits"):
        moved = jnp.abs(jax.nn.log_softmax(getattr(one, name)) - jax.nn.log_softmax(getattr(other, name)))
        assert float(jnp.min(jnp.max(moved, axis=-1)[..., 6:40])) > 1e-4


@pytest.mark.parametrize(("drafts", "accepted"), [("hit", 8), ("miss", 0), ("mix", 6)])
def test_cyc_acceptance_in_transformers(tmp_path, drafts, accepted):
    """transformers' own MTP layer, fed 8 consecutive pairs of counted text, makes the drafts the name promises."""
    path = write_cyc(tmp_path / "cyc", drafts)
    tokens = np.arange(20, 30)[None]
    reference = np.argmax(reference_logits(path, tokens)[1][0][0], axis=-1)
    assert int(np.sum(reference[:8] == tokens[0, 2:])) == accepted


def test_oracle_refuses_a_model_it_would_fill_with_noise(tmp_path):
    """The oracle's own guard: transformers gives a missing tensor random values and merely warns."""
    path = write_rnd(tmp_path / "rnd")
    config = (path / "config.json").read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 5')
    (path / "config.json").write_text(config)
    with pytest.raises(AssertionError, match="missing_keys"), hugging_face_model(path):
        pass
