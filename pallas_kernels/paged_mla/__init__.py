"""Attention of a few query tokens per row over a paged latent cache."""

from pallas_kernels.paged_mla.mosaic import plan_splits
from pallas_kernels.paged_mla.op import paged_mla
from pallas_kernels.paged_mla.splits import Splits

__all__ = ["Splits", "paged_mla", "plan_splits"]
