"""A model's files.

source.py, s3.py, settings.py       locate and download them
files.py                            the files of a folder, and copies of those that are not weights
config_json.py, multimodal.py       members of config.json; of a multimodal model, those of its text part
rope_override.py                    settings that replace its rotary positions
model_facts.py                      facts on which router and workers agree: vocabulary, special tokens, maximum length
generation_config.py                the sampling that the model recommends
tokenizer_fingerprint.py            the files of a tokenizer, and their hash
tokenizer_files.py                  tokenizers, also of older checkpoint formats
byte_level_bpe.py                   byte-level BPE, and the vocabularies of tiktoken and Mistral
tensors.py                          weights: which safetensors file holds which tensor
adapters.py                         LoRA adapters
partition_manifest.py               a model whose weights are partitioned ahead of time
new_folder.py                       a folder that appears when it is complete
watched_files.py                    files that must not change while a model is made of them
grammar.py, gbnf.py                 structured output: grammars over the model's vocabulary
gguf/                               models of llama.cpp
"""
