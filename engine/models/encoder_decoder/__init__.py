"""Encoder-decoder models (T5 and its kind): facts, names of weights, and the forward pass.

A sequence is the prompt, the decoder's start token, and what was generated. It has one KV per layer and position, as
other models' sequences have, in one block table: at the prompt's positions it is that of cross-attention, projected
from what the encoder made of the prompt and never written again; at those after it, of the decoder's own tokens.
"""
