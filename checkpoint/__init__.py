"""A model's files.

source.py, hub.py, s3.py, settings.py         locate and download them
model_files.py, rope_override.py              facts from config.json: vocabulary, special tokens, maximum length
tokenizer_files.py, sentencepiece_files.py    tokenizers, also of older checkpoint formats
tensors.py                                    weights: which safetensors file holds which tensor
grammar.py                                    structured output: grammars over the model's vocabulary
"""
