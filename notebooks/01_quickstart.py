# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart
#
# Load the small trained model that comes with jaxspec, generate with speculative decoding, read the acceptance, check
# that speculation changed nothing, and look at the page table before and after one round.

# %%
from jaxspec import LLM, SamplingParams

llm = LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 3}, max_model_len=256, max_num_seqs=4)
greedy = SamplingParams(temperature=0.0, max_tokens=64)
prompts = ["def fibonacci(n):", "class Stack:\n    def push(self, item):"]
outputs = llm.generate(prompts, greedy)
for out in outputs:
    print(out.prompt + out.outputs[0].text, end="\n\n")

# %% [markdown]
# ## Acceptance
#
# Each round verifies three drafts of the model's multi-token-prediction module in one pass of the trunk. The mean
# acceptance length counts the tokens such a pass yields, the trunk's own included: 1 would be no gain, 4 the most.

# %%
metrics = llm.get_metrics()
print(f"mean acceptance length  {metrics.mean_acceptance_length:.2f}")
for place, rate in enumerate(metrics.acceptance_rate_per_position, 1):
    print(f"draft {place} accepted        {rate:.0%}")

# %% [markdown]
# ## Speculation changes nothing
#
# Without drafts the model gives the same tokens, greedy or sampled: by default the output depends on model, prompt
# and seed alone, not on how many drafts there were or what else was in the batch.

# %%
plain = LLM(max_model_len=256, max_num_seqs=4)
sampled = SamplingParams(temperature=0.8, seed=7, max_tokens=64)
for params in (greedy, sampled):
    ours, theirs = llm.generate(prompts, params), plain.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in theirs]
print("equal, greedy and sampled")

# %% [markdown]
# ## Requests that come at any time
#
# `step` goes on with every request and returns their outputs so far. The second request here comes while the first is
# decoded; it starts with tokens that are cached already, of which only what is new is computed.

# %%
llm.add_request("first", prompts[0], greedy)
arrived = False
while llm.has_unfinished_requests():
    for out in llm.step():
        print(f"{out.request_id:8}{len(out.outputs[0].token_ids):4} tokens  {out.outputs[0].finish_reason or ''}")
        if not arrived and len(out.outputs[0].token_ids) > 20:
            llm.add_request("second", outputs[0].prompt_token_ids + outputs[0].outputs[0].token_ids[:40], greedy)
            arrived = True
print(llm.get_metrics().summary())

# %% [markdown]
# ## One round, by hand
#
# Below `LLM` everything is a function from state to state. Here are two rows over a small pool of pages of eight
# tokens: `prefill` caches the prompts and drafts three tokens, `decode_round` verifies them and drafts anew.

# %%
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import KVCache, SamplingState, decode_round, init_state, prefill

config, params, spec = llm.config, llm.params, llm.spec
ids = [llm.tokenizer.encode(p) for p in prompts]
lengths = jnp.array([len(i) for i in ids])
padded = jnp.array([i + [0] * (16 - len(i)) for i in ids])

cache = KVCache.create(config, num_pages=16, page_size=8, dtype=jnp.float32)
sampling = SamplingState.stack([(greedy, 0, ())] * 2, num_stop_ids=1)
empty = init_state(config, spec, cache, sampling, max_model_len=48)
before, _ = jax.jit(prefill, static_argnums=(1, 2))(params, config, spec, empty, padded, lengths, lengths + 32)
step = jax.jit(partial(decode_round, config=config, spec=spec))
after, info = step(params, state=before)

for row in range(2):
    drafts = [llm.tokenizer.decode([t]) for t in before.drafts.tokens[row].tolist()]
    count = int(info.num_tokens[row])
    emitted = [llm.tokenizer.decode([t]) for t in info.tokens[row, :count].tolist()]
    print(f"row {row}: drafts {drafts}, accepted {int(info.num_accepted[row])}, emitted {emitted}")

# %% [markdown]
# The pool before and after the round, a square a slot: which row owns the page, and which slots hold a verified
# token. Page 0 is scratch. A row owns just the pages its cached tokens need; what a round takes beyond that for
# drafts it rejects, it gives back.

# %%
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap


def slots(state):
    """0 free, 1 scratch, then for each row: owned and verified."""
    pages, size = state.cache.latent.shape[1:3]
    shown = np.zeros((pages, size), int)
    shown[0] = 1
    for row, count in enumerate(state.table.num_pages.tolist()):
        owned = np.asarray(state.table.page_ids[row, :count])
        shown[owned] = 2 + 2 * row
        for position in range(int(state.kv_len[row])):
            shown[owned[position // size], position % size] = 3 + 2 * row
    return shown


names = ["free", "scratch", "row 0: owned", "row 0: verified", "row 1: owned", "row 1: verified"]
colours = ListedColormap(["white", "lightgrey", "#bcd9f2", "#1f6fb4", "#fbd9b4", "#e07b12"])
figure, axes = plt.subplots(1, 2, figsize=(8, 5), sharey=True)
for axis, state, title in zip(axes, (before, after), ("before the round", "after it"), strict=True):
    picture = axis.pcolormesh(slots(state), cmap=colours, vmin=-0.5, vmax=5.5, edgecolors="grey", linewidth=0.5)
    axis.set(title=f"{title}: kv_len {state.kv_len.tolist()}", xlabel="slot of the page")
axes[0].invert_yaxis()
axes[0].set_ylabel("page")
bar = figure.colorbar(picture, ax=axes, ticks=range(6))
bar.ax.set_yticklabels(names)
plt.show()
