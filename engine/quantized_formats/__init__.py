"""Checkpoints with quantised matrices.

config.py,              which module is stored how, from config.json
compressed_tensors_config.py,
auto_round_config.py, bitnet_config.py, gguf_config.py, hqq_config.py,
modelopt_config.py, quark_config.py, torchao_config.py
members.py              members of config.json that several methods have
storage.py              MatrixStorage: how a matrix is stored; Quantization: which module has which
matrix.py               QuantizedMatrix: integers (or fp8), scales and zeros of one matrix; exact dequantisation
awq.py, gptq.py,        formats: the tensors that a matrix is stored in, and how they become a QuantizedMatrix
compressed_tensors.py,
bitnet.py, bitsandbytes.py, gguf.py, hqq.py, torchao.py,
e2m1.py, mxfp4.py, nvfp4.py
unread.py               formats that are refused by name, and what to serve instead
modules.py              finds, checks and reads the tensors of one module
"""
