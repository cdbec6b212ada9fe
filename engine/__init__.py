"""The engine: runs one model on one device. A scheduler without tensors plans, a model runner without policy computes.

Life of a step (`Engine.step` in loop.py):

    commands    loop.py           add, reserve, commit and abort run between two steps
    schedule    scheduler.py      picks sequences and token counts, allocates KV blocks     -> ScheduledBatch (batch.py)
    draft       speculation/      optional: appends draft tokens to sequences that decode
    build       step_input.py     flattens the batch to plain arrays                        -> StepInput
    forward     model_runner.py   models/ and attention/ compute hidden states and write KV (kv_cache.py)
    sample      sampler.py        penalties, masks, temperature, truncation, draw           -> RunnerOutput (batch.py)
    update      scheduler.py      appends the tokens, publishes or frees blocks             -> SequenceOutput

Pure (ints and lists; no torch, no grpc): sequence, block_pool, batch, scheduler, speculation/.
Torch: model_runner, step_input, sampler, masks, kv_cache, weights, attention/, models/. CPU kernels: kernels/.
Composition from settings: load.py, for the runner and the drafter. Settings without torch: settings.py.
"""
