"""Recurrent layers: convolutions, Mamba 1 and 2, gated delta nets, and their states."""
