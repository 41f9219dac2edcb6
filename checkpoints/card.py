"""The bundled model's card and loss curve, rendered from the files beside the weights: no figure is typed."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CARD = """\
---
license: apache-2.0
language: en
library_name: jaxspec
tags: [deepseek_v3, multi-token-prediction, speculative-decoding, python]
---
<!-- Rendered by checkpoints/card.py from the JSON files in this folder; edit that script, not this file. -->

# stdlib-9m

A small language model in DeepSeek-V3's architecture with one multi-token-prediction (MTP) module, trained on the
sources of Python's standard library. It is a demonstration: large enough to draft well above chance, so that
speculative decoding can be shown and tested on any machine, and of no other use.

## Model
{model}

## Data
The standard library of CPython {python} as installed: its modules ({library_tokens:.1f} M tokens, with the topics of
`help()`) and its tests ({test_tokens:.1f} M tokens). Encoding tables, generated files, IDLE, lib2to3 and
site-packages are left out. 2% of the library's files, chosen by a hash of their path, are held out, and so are all
tests of these modules. CPython is licensed under the PSF License Version 2 (PSF-2.0), Copyright © Python Software
Foundation; the weights, like the rest of this repository, under Apache-2.0.

## Training
`{command}`, JAX {jax}, on a CPU: {steps} steps of {batch} x {seq_len} tokens, {tokens:.1f} M in all, in
{minutes:.0f} minutes on two CPU cores shared with other work{unfinished}. AdamW, peak rate 2e-3 held and then brought
to zero over the last 35% of the steps, decay 0.1; loss = next token + 0.3 x MTP. Library and tests alternate for
the first 40%, then the library comes alone. Router biases balance the experts without a loss. The tokenizer is a
byte-level BPE of 2,048 entries fitted on the library.

![Loss during training](loss.png)

## Held-out loss
{held_out}

## Acceptance
{acceptance}

## Limits
Trained on {tokens:.1f} M tokens of Python with a context of {seq_len} tokens: the configuration permits 1,024, but
nothing longer than {seq_len} was seen in training. It writes text that looks like library code and means little; it
knows no facts, follows no instructions, and often repeats itself. Acceptance rates here say nothing about those of
a large model.
"""


def plot_losses(folder: Path) -> None:
    """Draws `loss.png` from `training.json`."""
    log = _read(folder, "training.json")["log"]
    tokens = [line["tokens"] / 1e6 for line in log]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    curves = {"loss": ("C0", "next token, batch"), "held_out": ("C0", "next token, held out")}
    curves |= {"mtp_loss": ("C1", "MTP, batch"), "held_out_mtp": ("C1", "MTP, held out")}
    for name, (colour, label) in curves.items():
        alpha = 1.0 if name.startswith("held_out") else 0.4
        axes.plot(tokens, [line[name] for line in log], color=colour, alpha=alpha, label=label)
    axes.set(xlabel="million tokens", ylabel="cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=110)
    plt.close(figure)


def render_card(folder: Path) -> None:
    """Writes `README.md`; what was not evaluated is said to be missing."""
    facts, evaluation = _read(folder, "training.json"), _read(folder, "evaluation.json")
    last, done = facts["log"][-1], facts["trained_steps"]
    card = CARD.format(
        model=_model_table(_read(folder, "config.json"), facts["parameters"]),
        held_out=_held_out(evaluation),
        acceptance=_acceptance(evaluation),
        library_tokens=facts["library_tokens"] / 1e6,
        test_tokens=facts["test_tokens"] / 1e6,
        tokens=last["tokens"] / 1e6,
        minutes=last["seconds"] / 60,
        unfinished="" if done == facts["steps"] else f" (intermediate: step {done})",
        **{key: facts[key] for key in ("python", "jax", "command", "steps", "batch", "seq_len")},
    )
    (folder / "README.md").write_text(card)


def _read(folder: Path, name: str) -> dict:
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else {}


def _model_table(config: dict, parameters: int) -> str:
    chosen, shared = config["num_experts_per_tok"], config["n_shared_experts"] * config["moe_intermediate_size"]
    ranks = f"query rank {config['q_lora_rank']}, latent {config['kv_lora_rank']}"
    heads = f"{config['qk_nope_head_dim']} + {config['qk_rope_head_dim']} rotary, value {config['v_head_dim']}"
    modules = config["num_nextn_predict_layers"]
    rows = {
        "parameters": f"{parameters / 1e6:.2f} M, stored in bfloat16",
        "layers": f"{config['num_hidden_layers']}, the first dense, and {modules} MTP module",
        "hidden size": config["hidden_size"],
        "attention": f"MLA, {config['num_attention_heads']} heads of {heads}; {ranks}",
        "routed experts": f"{config['n_routed_experts']} x {config['moe_intermediate_size']}, {chosen} chosen",
        "shared experts": f"{config['n_shared_experts']}, {shared} wide together",
        "dense feed-forward": config["intermediate_size"],
        "vocabulary": f"{config['vocab_size']:,}; token 0 ends a text, no BOS",
    }
    return _table(["", ""], [[name, str(value)] for name, value in rows.items()])


def _held_out(evaluation: dict) -> str:
    if not evaluation:
        return "Not evaluated yet: run `checkpoints/evaluate.py`."
    return (
        "**{bits_per_byte:.3f} bits per byte** on {num_files} files ({held_out_bytes:,} bytes, {held_out_tokens:,} "
        "tokens): {nats_per_token:.3f} nats per token, MTP {mtp_nats_per_token:.3f}, in windows of {context} tokens "
        "that overlap by half. The MTP loss may be the lower one: the module is given one token more."
    ).format(num_files=len(evaluation["held_out_files"]), **evaluation)


def _acceptance(evaluation: dict) -> str:
    if "acceptance" not in evaluation:
        return "Not evaluated yet: run `checkpoints/evaluate.py`."
    rows = [_acceptance_row(run) for run in evaluation["acceptance"]]
    whole, least = (evaluation["acceptance"][0][part]["num_prompts"] for part in ("all", "least_repetitive"))
    header = ["", "K", "mean acceptance length", "accepted at each place", "8-grams repeated"]
    header += [f"length, {least} least repetitive", "repeated"]
    return (
        f"{whole} held-out prompts of {evaluation['prompt_tokens']} tokens, {evaluation['new_tokens']} new tokens "
        "each. The mean acceptance length counts the tokens of a verification, the target's own included. Loops "
        f"flatter it, so the {least} least repetitive outputs of each run stand apart.\n\n"
    ) + _table(header, rows)


def _acceptance_row(run: dict) -> list[str]:
    whole, least = run["all"], run["least_repetitive"]
    return [
        "greedy" if run["temperature"] == 0 else f"temperature {run['temperature']}",
        str(run["num_speculative_tokens"]),
        f"{whole['mean_acceptance_length']:.2f}",
        " / ".join(f"{rate:.2f}" for rate in whole["acceptance_rate_per_position"]),
        f"{whole['repeated_8grams']:.0%}",
        f"{least['mean_acceptance_length']:.2f}",
        f"{least['repeated_8grams']:.0%}",
    ]


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
