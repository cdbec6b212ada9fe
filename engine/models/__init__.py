"""Models: configuration from config.json, names of checkpoint tensors, and the forward pass.

read_config.py         reads config.json to a ModelConfig (model_config.py): shared keys, then its family (families/)
                       with parts in other *_config.py; tensor_names.py has the names of checkpoint tensors
parameters.py          maps checkpoint tensors to the parameters of the decoder; row_orders.py
encodings.py           the encodings of stored matrices, such as int8 (rounding.py), and parameters as they are loaded
decoder.py             the eager decoder, of layers (layer.py, blocks.py, norms.py, rope.py, latent.py) with matrices of
                       any encoding (linear.py); experts: routing.py and, on a GPU, expert_products.py
per_layer.py, streams.py   additional parts of layers of Gemma 4 and 3n; recurrent/: layers with a state
adapters.py            LoRA adapters; adapted_linear.py and packed_adapters.py apply them, eager and compiled
compiled_decoder.py    the same decoder as one compiled loop, for CPUs with AVX2; cpu_support.py says for which models
loop_*.py              what that loop is called with: constants, memory, threads; rotation_table.py
row_shares.py          how its threads divide the rows of a step; result_rows.py: which rows go through the last layers
packed_weights.py      the weights of that loop, and their files; packed_decoder.py packs them
kv_groups.py           which layers share the blocks of a group
share.py               the share of a model that one rank holds; rank_group.py: what models ask of a group of ranks
encoder_decoder/       T5 and its relatives
"""
