"""Strict settings for every test: CPU only, shapes checked, rank promotion an error."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

from jaxtyping import install_import_hook

install_import_hook(["jaxspec", "pallas_kernels"], "typecheck.checked")

import jax
import pytest

from jaxspec.config import ModelConfig, RopeConfig

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def key():
    """A fixed random key."""
    return jax.random.key(0)


@pytest.fixture(scope="session")
def rnd_config():
    """Configuration of the field log's RND checkpoint: three layers, the first dense, and one MTP module."""
    return ModelConfig(
        model_type="deepseek_v3",
        vocab_size=128,
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        max_position_embeddings=256,
        tie_word_embeddings=False,
        attention_bias=False,
        num_mtp_layers=1,
        initializer_range=0.1,
        eos_token_ids=(),
    )
