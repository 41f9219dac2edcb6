"""Attention of a few query tokens per row over a paged latent cache."""

from pallas_kernels.paged_mla.op import paged_mla

__all__ = ["paged_mla"]
