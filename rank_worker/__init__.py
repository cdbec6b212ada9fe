"""The process of one rank. A worker starts it; it computes what the worker's rank 0 commands."""
