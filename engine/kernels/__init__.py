"""Compiled kernels: a leaf package. Kernels take arrays and named tuples of their own; see docs/kernels.md."""
