"""DeepSeek-V3.2: V3 with sparse attention (DSA), which equals the dense one while the context is within index_topk.

The indexer, which chooses the tokens beyond that context, is not computed and its weights are not read.
"""

import dataclasses

from jaxspec.families import deepseek_v3
from jaxspec.families.base import leading_dense_layers, same

INDEXER = r"model\.layers\.\d+\.self_attn\.indexer\.(wq_b|wk|weights_proj|k_norm)\.(weight|weight_scale_inv|bias)"

FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    required={k: v for k, v in deepseek_v3.FAMILY.required.items() if k != "first_k_dense_replace"}
    | same("index_topk"),
    derive=lambda config: leading_dense_layers(config, default=3),
    derived=same("first_k_dense_replace"),
    fixed=deepseek_v3.FAMILY.fixed | {"rope_interleave": (True,)},
    irrelevant=frozenset("mlp_layer_types layer_types index_head_dim index_n_heads indexer_rope_interleave".split()),
    ignored_tensors=lambda _: INDEXER,
)
