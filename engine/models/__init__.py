"""Models: configuration from config.json, names of checkpoint tensors, and the forward pass.

read_config.py         reads config.json to a ModelConfig (model_config.py): shared keys, then its family (families/)
parameters.py          maps checkpoint tensors to the parameters of the decoder
encodings.py           the encodings of stored matrices, such as int8 (rounding.py), and parameters as they are loaded
decoder.py             the eager decoder, of layers (layer.py, rope.py) whose matrices have an encoding (linear.py)
compiled_decoder.py    the same decoder as one compiled loop, for CPUs with AVX2; cpu_support.py says for which models
packed_weights.py      the weights of that loop, and their files; packed_decoder.py packs them
share.py               the share of a model that one rank holds; rank_group.py: what models ask of a group of ranks
encoder_decoder/       T5 and its relatives
"""
