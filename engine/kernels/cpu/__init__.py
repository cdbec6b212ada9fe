"""Kernels for CPUs with AVX-512, compiled by numba. `step.py` is the outermost loop; docs/kernels.md is the guide."""
