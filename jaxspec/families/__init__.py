"""The model families, by `model_type`. A new one is a file here and a line below."""

from jaxspec.families import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    glm4_moe_lite,
    glm_moe_dsa,
    kimi_k2,
    longcat_flash,
    mistral4,
    youtu,
)
from jaxspec.families.base import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        deepseek_v2.FAMILY,
        deepseek_v3.FAMILY,
        deepseek_v32.FAMILY,
        glm4_moe_lite.FAMILY,
        glm_moe_dsa.FAMILY,
        kimi_k2.FAMILY,
        longcat_flash.FAMILY,
        mistral4.FAMILY,
        youtu.FAMILY,
    )
}

__all__ = ["FAMILIES", "Family"]
