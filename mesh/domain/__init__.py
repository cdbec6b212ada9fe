"""Domain types of the mesh: standard library only, no I/O."""
