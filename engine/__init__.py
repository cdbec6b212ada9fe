"""The model: a pure core that plans, a torch core that computes, and a loop that joins them.

Pure (no torch, no grpc): sequence, block_pool, batch, scheduler.
Torch: kv_cache, attention, model_runner, sampler, models/, weights.
Shell: loop.
"""
