"""Drafters: what proposes the tokens that a round verifies."""

from jaxspec.drafters.mtp import MTPDrafter
from jaxspec.drafters.protocol import Drafter, Drafts, Verified

DRAFTERS: dict[str, Drafter] = {"mtp": MTPDrafter()}

__all__ = ["DRAFTERS", "Drafter", "Drafts", "MTPDrafter", "Verified"]
