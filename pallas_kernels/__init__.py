"""Paged MLA operations on raw arrays. This package imports jax only and never jaxspec."""
