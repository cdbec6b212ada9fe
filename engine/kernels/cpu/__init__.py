"""Kernels for CPUs with AVX2 or better, compiled by numba. `step.py` is the outermost loop; docs/kernels.md is the
guide."""
