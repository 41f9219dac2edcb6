"""Attention of a few query tokens per row over a paged latent cache."""

from pallas_kernels.paged_mla.mosaic import default_parts
from pallas_kernels.paged_mla.op import paged_mla
from pallas_kernels.paged_mla.splits import Splits, make_splits

__all__ = ["Splits", "default_parts", "make_splits", "paged_mla"]
