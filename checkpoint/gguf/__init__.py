"""Models in GGUF, the format of llama.cpp: how their metadata, tensors and vocabularies become those of a Hugging Face
checkpoint. `tandem convert` is their only user.
"""
