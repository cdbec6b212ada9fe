"""Turns a checkpoint into CTranslate2's format: python -m bench.peers.convert_ctranslate2 CHECKPOINT TARGET FORMAT.

FORMAT is float32, bfloat16 or int8: the weights'; with int8 the activations are int8 too, as they come.
"""

import sys

from ctranslate2.converters import TransformersConverter

if __name__ == "__main__":
    checkpoint, target, weights = sys.argv[1:]
    TransformersConverter(checkpoint).convert(target, quantization=weights)
