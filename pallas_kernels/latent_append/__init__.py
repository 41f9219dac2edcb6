"""Writes the latents of new tokens into their slots of the paged cache."""

from pallas_kernels.latent_append.op import latent_append

__all__ = ["latent_append"]
