"""A model's files.

source.py, s3.py, settings.py   locate and download them
text_part.py                    the text part of a multimodal model's config.json
model_files.py                  facts from config.json: vocabulary, special tokens, maximum length, rotary positions
tokenizer_files.py              tokenizers, also of older checkpoint formats
tensors.py                      weights: which safetensors file holds which tensor
new_folder.py                   writes a folder that appears when it is complete
grammar.py                      structured output: grammars over the model's vocabulary
"""
