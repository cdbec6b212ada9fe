"""A model's files.

source.py, s3.py, settings.py       locate and download them
config_json.py, text_part.py        members of config.json; of a multimodal model, those of its text part
model_files.py                      facts from it: vocabulary, special tokens, maximum length, rotary positions
generation_config.py                the sampling that the model recommends
tokenizer_files.py                  tokenizers, also of older checkpoint formats
byte_level_bpe.py                   byte-level BPE, and the vocabularies of tiktoken and Mistral
tensors.py                          weights: which safetensors file holds which tensor
adapters.py                         LoRA adapters
partition_manifest.py               a model whose weights are partitioned ahead of time
new_folder.py                       writes a folder that appears when it is complete
watched_files.py                    files that must not change while a model is made of them
grammar.py, gbnf.py                 structured output: grammars over the model's vocabulary
gguf/                               models of llama.cpp
"""
