"""Who is in the mesh. One interface (Registry), fed by workers' streams to one router, or by Redis for several."""
