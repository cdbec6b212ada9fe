"""The decoder-only model families: facts from config.json, names of weights, and the forward pass."""
