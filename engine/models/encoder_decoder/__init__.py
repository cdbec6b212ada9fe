"""Encoder-decoder models (T5 and its relatives): configuration, checkpoint tensors, and the forward pass.

A sequence consists of the prompt, the decoder's start token, and the generated tokens. As for other models, it has one
block table and one KV per layer and position. At the prompt's positions this is the KV of cross-attention, projected
once from the encoder's output; at later positions it is the KV of the decoder's self-attention.
"""
