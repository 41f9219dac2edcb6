"""What comes along: the trained checkpoint, its trainer, the notebook's two forms."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jupytext
import numpy as np
import pytest
import torch
from fixtures import write_rnd
from transformers import AutoModelForCausalLM, AutoTokenizer

from jaxspec import LLM, SamplingParams, dense_forward, load
from jaxspec.engine import bundled_checkpoint

ROOT = Path(__file__).parents[1]
PROMPTS = ["def fibonacci(n):", "class Stack:\n", "import os"]


@pytest.fixture(scope="module")
def llm():
    return LLM(speculative_config={"num_speculative_tokens": 3}, max_model_len=128, max_num_seqs=4)


def test_it_is_small():
    assert sum(file.stat().st_size for file in bundled_checkpoint().iterdir()) <= 25e6


def test_greedy_tokens_equal_transformers(llm):
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=32))
    tokenizer = AutoTokenizer.from_pretrained(bundled_checkpoint())
    model = AutoModelForCausalLM.from_pretrained(bundled_checkpoint(), dtype=torch.float32).eval()
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        assert ids["input_ids"][0].tolist() == out.prompt_token_ids
        expected = model.generate(**ids, max_new_tokens=32, do_sample=False, pad_token_id=0)
        assert out.outputs[0].token_ids == expected[0, ids["input_ids"].shape[1] :].tolist()


def test_the_modules_it_was_trained_with_are_accepted(llm):
    llm.reset_metrics()
    llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    assert llm.get_metrics().mean_acceptance_length > 1.5


def test_the_cards_figures_are_those_measured():
    folder = bundled_checkpoint()
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["bits_per_byte"] <= 1.15
    assert f"{evaluation['bits_per_byte']:.3f}" in (folder / "README.md").read_text()


def test_the_trainers_loss_is_the_dense_twins(tmp_path, monkeypatch):
    """The fast form of the loss against plain cross-entropy of `dense_forward`, in float32 both."""
    monkeypatch.syspath_prepend(ROOT / "checkpoints")
    fast_forward = importlib.import_module("fast_forward")
    monkeypatch.setattr(fast_forward, "mixed_matmul", lambda x, weight: x @ weight)
    config, params = load(write_rnd(tmp_path / "rnd"))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 128, (2, 18)), jnp.int32)
    main, mtp, loads = jax.jit(fast_forward.losses, static_argnums=1)(params, config, tokens)
    dense = dense_forward(params, config, tokens)
    for loss, logits, ahead in ((main, dense.logits, 1), (mtp, dense.mtp_logits[0], 2)):
        log_p = jax.nn.log_softmax(logits[:, :16])
        labels = tokens[:, ahead : 16 + ahead]
        np.testing.assert_allclose(loss, -jnp.mean(jnp.take_along_axis(log_p, labels[..., None], -1)), rtol=1e-5)
    assert loads.shape == dense.expert_load.shape


@pytest.mark.slow
def test_the_trainer_runs_and_resumes(tmp_path):
    command = [sys.executable, ROOT / "checkpoints/train.py", "--batch", "2", "--seq-len", "32"]
    command += ["--out", tmp_path / "model", "--run-dir", tmp_path / "run"]
    for steps in ("2", "4"):
        subprocess.run([*command, "--steps", steps], check=True, timeout=1500)
    llm = LLM(tmp_path / "model", speculative_config={"num_speculative_tokens": 2}, max_model_len=64)
    [out] = llm.generate("import", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert len(out.outputs[0].token_ids) == 4


@pytest.mark.parametrize("source", sorted((ROOT / "notebooks").glob("*.py")), ids=lambda p: p.stem)
def test_a_notebook_and_its_source_say_the_same(source):
    executed = jupytext.read(source.with_suffix(".ipynb"))
    cells = [(cell.cell_type, cell.source) for cell in jupytext.read(source).cells]
    assert [(cell.cell_type, cell.source) for cell in executed.cells] == cells
    assert all(cell.execution_count for cell in executed.cells if cell.cell_type == "code")
