"""Attention over the paged KV cache: one backend per kind of hardware and library."""
