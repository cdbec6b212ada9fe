"""Layers with a recurrent state in place of attention: what they are, where the states are, and how they compute."""
