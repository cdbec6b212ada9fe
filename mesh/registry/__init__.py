"""Who is in the mesh. One interface (Registry); the in-process implementation is hosted by a single router."""
