"""The mesh's nouns: plain Python, standard library only, no I/O."""
