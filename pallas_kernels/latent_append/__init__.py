"""Writes the latents of new tokens into their slots of the paged cache."""

from pallas_kernels.latent_append.op import latent_append, norm_rope_append
from pallas_kernels.latent_append.reference import norm_rope

__all__ = ["latent_append", "norm_rope", "norm_rope_append"]
