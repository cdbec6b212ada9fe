"""Recurrent layers: convolutions, Mamba 2, gated delta nets, and their states."""
