"""How an engine shares the device among requests: sizes, and the shapes that programs are compiled for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxspec.cache.kv_cache import bytes_per_token
from jaxspec.config import ModelConfig, SpeculativeConfig
from jaxspec.decoding.state import pages_per_row
from pallas_kernels.compat import not_hopper

_KV_CACHE_DTYPES = {
    "auto": None,
    "bfloat16": "bfloat16",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine. Names are vLLM's where it has one.

    Attributes:
        max_model_len: most tokens of one request, prompt and output.
        max_num_seqs: rows, that is, most requests at once.
        page_size: tokens a page holds.
        num_pages: pages of the pool, the scratch page included. None: what `kv_cache_memory_bytes` holds, or
            `max_num_seqs` full requests.
        kv_cache_memory_bytes: bytes of the pool, for the layers of target and drafter together; None: no bound.
        kv_cache_dtype: of the pool: "auto" is the activations'; "bfloat16", "float32"; or "fp8" (also "fp8_e4m3"),
            which is float8_e4m3fn latents with a scale per 128 columns, and bfloat16 keys.
        attention_backend: of attention and of writes to the pool: "mosaic" (Pallas kernels for Hopper GPUs), "xla",
            or "auto", the first that can.
        max_num_batched_tokens: most prompt tokens cached by one step.
        row_buckets: numbers of decoding rows that programs are compiled for; None: 1, 4, 16 and so on. `max_num_seqs`
            is always one.
        chunk_buckets: (rows, tokens of each) that a chunk of prompts is compiled for; None: powers of four within
            `max_num_batched_tokens`.
        rounds_per_dispatch: rounds in one program. More of them take less time each where the host is slow beside the
            device, and let rows that have ended wait longer.
        overlap: how many steps may be under way that the host has not read; 0 waits for each.
        enable_prefix_caching: keep the pages of past requests, while nobody needs the room, for those that start with
            the same tokens. None: where the model allows it, see `caches_prefixes`.
        num_stop_ids: most stop tokens of one request, the model's own included.
        debug: check the laws of the page table and of the ledger after every program.

    Raises:
        ValueError: a size that cannot be.
    """

    max_model_len: int
    max_num_seqs: int = 16
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    max_num_batched_tokens: int = 256
    row_buckets: tuple[int, ...] | None = None
    chunk_buckets: tuple[tuple[int, int], ...] | None = None
    rounds_per_dispatch: int = 2
    overlap: int = 1
    enable_prefix_caching: bool | None = None
    num_stop_ids: int = 64
    debug: bool = False

    def __post_init__(self) -> None:
        for name in "max_model_len max_num_seqs page_size max_num_batched_tokens rounds_per_dispatch".split():
            _require_integer(name, getattr(self, name), at_least=1)
        for name in ("num_pages", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                _require_integer(name, getattr(self, name), at_least=1)
        _require_integer("overlap", self.overlap, at_least=0)
        _require_integer("num_stop_ids", self.num_stop_ids, at_least=0)
        if self.num_pages is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("num_pages and kv_cache_memory_bytes: got both, expected at most one of them")
        choices = {"kv_cache_dtype": [*_KV_CACHE_DTYPES], "attention_backend": ["auto", "mosaic", "xla"]}
        for name, expected in choices.items():
            if (got := getattr(self, name)) not in expected:
                raise ValueError(f"{name}: got {got!r}, expected one of {expected}")
        for rows in self.row_buckets or ():
            _require_integer("row_buckets", rows, at_least=1)
        for size in (size for bucket in self.chunk_buckets or () for size in bucket):
            _require_integer("chunk_buckets", size, at_least=1)

    def pool_dtype(self, dtype: Any) -> Any:
        """The dtype of the pool beside activations of `dtype`; float8_e4m3fn is that of the latents."""
        return jnp.dtype(_KV_CACHE_DTYPES[self.kv_cache_dtype] or dtype)

    def backend(self) -> str | None:
        """The backend that the ops on the pool are forced to, or None.

        Raises:
            NotImplementedError: the device cannot run it.
        """
        if self.attention_backend == "mosaic" and (reason := not_hopper()):
            raise NotImplementedError(f"attention_backend: got 'mosaic', but {reason}; 'auto' takes what there is")
        return None if self.attention_backend == "auto" else self.attention_backend

    def pool_pages(self, config: ModelConfig, spec: SpeculativeConfig, dtype: Any) -> int:
        """Pages of the pool, the scratch page included.

        Args:
            config: the architecture.
            spec: the speculation.
            dtype: of activations.

        Raises:
            ValueError: one request of `max_model_len` would not find room, or the pool cannot have its dtype.
        """
        page_bytes = self.page_size * bytes_per_token(config, self.pool_dtype(dtype))
        drafts = spec.num_speculative_tokens
        least = pages_per_row(self.max_model_len, drafts, self.page_size) + 1
        name, got, expected, pages = "num_pages", self.num_pages, least, self.num_pages
        if self.kv_cache_memory_bytes is not None:
            name, got, expected = "kv_cache_memory_bytes", self.kv_cache_memory_bytes, least * page_bytes
            pages = got // page_bytes
        if pages is None:
            return self.max_num_seqs * (least - 1) + 1
        if pages < least:
            raise ValueError(
                f"{name}: got {got}, expected at least {expected}: one request of max_model_len {self.max_model_len} "
                f"with {drafts} drafts, and the scratch page"
            )
        return pages

    def caches_prefixes(self, config: ModelConfig, spec: SpeculativeConfig) -> bool:
        """Whether pages are kept for later requests.

        Raises:
            ValueError: that was asked for, and the model does not allow it.
        """
        modules = min(config.num_mtp_layers, spec.num_speculative_tokens)
        if self.enable_prefix_caching and modules > 1:
            raise ValueError(
                f"enable_prefix_caching: got True with {modules} MTP modules in use, expected one at most: those "
                "beyond the first go on from states that no cache holds"
            )
        return modules <= 1 if self.enable_prefix_caching is None else self.enable_prefix_caching

    def rows(self) -> list[int]:
        """The row buckets, from small to large."""
        buckets = (1, 4, 16, 64, 256) if self.row_buckets is None else self.row_buckets
        return sorted({rows for rows in buckets if rows < self.max_num_seqs} | {self.max_num_seqs})

    def chunks(self) -> list[tuple[int, int]]:
        """The chunk buckets, from small to large: rows, and tokens of each."""
        if self.chunk_buckets is not None:
            return sorted({(min(rows, self.max_num_seqs), width) for rows, width in self.chunk_buckets}, key=_area)
        most = min(self.max_num_batched_tokens, self.max_model_len)
        widths = [width for width in (16, 64, 256, 1024, 4096) if width < most] + [most]
        rows = [rows for rows in (1, 4, 16) if rows <= self.max_num_seqs]
        fitting = [(r, w) for r in rows for w in widths if r * w <= self.max_num_batched_tokens]
        return sorted(fitting, key=_area)


def _area(bucket: tuple[int, int]) -> int:
    return bucket[0] * bucket[1]


def _require_integer(name: str, value: Any, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}: got {value!r}, expected an integer of at least {at_least}")
