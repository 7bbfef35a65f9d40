"""The KV cache: its memory, who has which rows of it, and prompts that are found in it again.

`cache.KvCache` over `storage`; rows by `paged_allocator`, for sliding windows by `window_allocator`;
pages that several sequences see by `virtual_memory` (copy-on-write). `prefix_cache` and its `radix_tree`
know which prompts are there; `prefix_file` and `row_serializer` keep them for the next process.
"""
