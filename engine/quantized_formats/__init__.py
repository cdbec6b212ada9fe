"""Checkpoints with quantised matrices.

config.py               which module is stored how, from config.json
matrix.py               QuantizedMatrix: integers (or fp8), scales and zeros of one matrix; exact dequantisation
awq.py, gptq.py,        formats: the tensors that a matrix is stored in, and how they become a QuantizedMatrix
compressed_tensors.py,
mxfp4.py
modules.py              finds, checks and reads the tensors of one module
"""
