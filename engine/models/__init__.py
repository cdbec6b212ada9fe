"""Models: configuration from config.json, names of checkpoint tensors, and the forward pass.

read_config.py         reads config.json to a ModelConfig (model_config.py): shared keys, then its family (families/)
parameters.py          maps checkpoint tensors to the parameters of the decoder
decoder.py             the eager decoder, of layers (layer.py) whose matrices have a scheme (linear.py)
compiled_decoder.py    the same decoder as one compiled loop, for CPUs with AVX2
encoder_decoder/       T5 and its relatives
"""
