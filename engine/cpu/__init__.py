"""The decoder on CPU as one compiled loop over its layers: see step.py."""
