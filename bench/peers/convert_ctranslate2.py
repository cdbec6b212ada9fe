"""Turns a checkpoint into CTranslate2's format: python -m bench.peers.convert_ctranslate2 CHECKPOINT TARGET FORMAT.

FORMAT is the type of the weights: float32, bfloat16 or int8. With int8, activations are quantized to int8 at run time.
"""

import sys

from ctranslate2.converters import TransformersConverter

if __name__ == "__main__":
    checkpoint, target, weights = sys.argv[1:]
    TransformersConverter(checkpoint).convert(target, quantization=weights)
