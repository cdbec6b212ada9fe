"""Tensor and pipeline parallelism: ranks, the processes that compute each step of one worker together."""
