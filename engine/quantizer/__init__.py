"""Makes quantised checkpoints: the work of `tandem quantize`. engine/quantized_formats reads them.

make.py              the pass through the model: layer by layer, in bounded memory
float_checkpoint.py  the checkpoint that is quantised, which must not change meanwhile
layer.py             a layer of any family in fp32, which tells what its matrices multiply
statistics.py        the inputs of a matrix, summed over the calibration prompts
rare_experts.py      experts that few calibration tokens reach, and what they are rounded with
schemes.py           the schemes of the command: how each smooths and rounds
grids.py             int4, int8 and fp8: scales, rounding to the nearest number
smoothing.py         factors of channels: folded into a norm or the matrix before
awq.py, gptq.py      search of factors and clipping; rounding by second-order errors
compressed.py        matrices and config.json as compressed-tensors stores them
shards.py            writes safetensors while the model is read
quality.py           the quantised model beside the original on held-out prompts
"""

SCHEMES = {
    "w8a8": "int8 weights with a scale per output, int8 activations",
    "smoothquant": "w8a8 after large activations are moved into weights",
    "w4a16": "int4 weights in groups, rounded to nearest",
    "awq": "int4 weights in groups, after channels with large activations are scaled",
    "gptq": "int4 weights in groups, rounded so that errors cancel",
    "fp8": "fp8 weights with a scale per output, fp8 activations",
}
IN_GROUPS = ("w4a16", "awq", "gptq")
"""Schemes that have a group size."""
