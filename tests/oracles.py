"""What transformers' DeepSeek-V3 makes of a checkpoint folder, in float32 on the CPU."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import DeepseekV3ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

# These models are too small to share out, and the tests share the machine.
torch.set_num_threads(1)


@contextlib.contextmanager
def hugging_face_model(path: Path) -> Iterator[DeepseekV3ForCausalLM]:
    """The model, with its MTP layers at hand.

    transformers looks for them at layer 61 and nowhere else, by a class attribute that is set here to where this
    checkpoint has them.
    """
    config = json.loads((Path(path) / "config.json").read_text())
    first, count = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    before = DeepseekV3PreTrainedModel._keys_to_ignore_on_load_unexpected
    at = [re.escape(f"model.layers.{layer}.") + ".*" for layer in range(first, first + count)]
    DeepseekV3PreTrainedModel._keys_to_ignore_on_load_unexpected = at
    try:
        model, info = DeepseekV3ForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        # An oracle with a random weight would be none.
        faults = {key: value for key, value in info.items() if value}
        assert not faults, faults
        yield model.eval()
    finally:
        DeepseekV3PreTrainedModel._keys_to_ignore_on_load_unexpected = before


def reference_logits(path: Path, tokens: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [b, t, vocab] of whole sequences, and the MTP modules' logits.

    Module d's are [b, t - d - 1, vocab] and predict token i + d + 2 at position i. transformers puts its input (state
    i, token i + d + 1) at position i + d + 1.
    """
    ids, mtp_logits = torch.as_tensor(np.array(tokens)), []
    with hugging_face_model(path) as model, torch.no_grad():
        state = model.model(ids, use_cache=False).last_hidden_state
        logits = model.lm_head(state).numpy()
        if model.config.num_mtp_layers == 0:
            return logits, []
        mtp, cache = MtpModel.from_pretrained(model).eval(), MtpCache(config=model.config.get_mtp_config())
        for depth in range(mtp.num_mtp_layers):
            shifted, positions = ids[:, depth + 1 :], torch.arange(depth + 1, ids.shape[1])[None]
            state = mtp.forward_layer(depth, state[:, :-1], positions, cache, input_ids=shifted)
            mtp_logits.append(mtp._project_to_logits(state).numpy())
    return logits, mtp_logits


def greedy_reference(path: Path, prompt: Sequence[int], n: int, use_mtp: bool = False) -> list[int]:
    """The `n` greedy tokens (fewer after an end-of-sequence token) that follow the prompt.

    Args:
        path: checkpoint folder.
        prompt: token ids.
        n: how many tokens to generate.
        use_mtp: let transformers draft with the checkpoint's MTP layers; the tokens are the same.
    """
    ids = torch.tensor([list(prompt)])
    with hugging_face_model(path) as model:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n,
            do_sample=False,
            use_mtp=use_mtp,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
