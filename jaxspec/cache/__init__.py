"""The paged KV cache: pools, the table of pages, and the capacity ledger."""

from jaxspec.cache.capacity import Capacity
from jaxspec.cache.kv_cache import KVCache
from jaxspec.cache.page_table import PageTable
from jaxspec.cache.prefix import PublishedPages

__all__ = ["Capacity", "KVCache", "PageTable", "PublishedPages"]
