"""Sampling: from logits to tokens and their log-probs.

sampler.py      one step, on the logits' device: penalties.py, masks.py, then a draw of what truncation.py leaves
row_math.py     what that needs of whole rows, in torch on any device; host_rows.py: on CPU, by compiled loops
"""
