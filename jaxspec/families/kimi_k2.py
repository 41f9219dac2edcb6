"""Kimi-K2: DeepSeek-V3's architecture under its own name, with one router group and no MTP."""

import dataclasses

from jaxspec.families import deepseek_v3

# transformers has no class of this name: the model's authors say to run it as deepseek_v3.
FAMILY = dataclasses.replace(deepseek_v3.FAMILY, model_type="kimi_k2")
