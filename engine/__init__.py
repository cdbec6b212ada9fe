"""The engine: runs one model, on GPUs or CPUs, of one machine or several.

A scheduler without tensors plans, a model runner without policy computes. Several processes, the ranks, may compute a
step together, each on a GPU or cores of its own (ranks/); scheduler and sampler know nothing of them.

Life of a step (`Engine.step` in loop.py):

    commands    loop.py           add, reserve, commit and abort run between two steps
    schedule    scheduler.py      picks sequences, token counts, blocks (block_tables.py)  -> ScheduledBatch (batch.py)
    draft       speculation/      optional: appends draft tokens to sequences that decode
    build       step_input.py     flattens the batch to plain arrays                        -> StepInput
    forward     model_runner.py   models/ and attention/ compute hidden states and write KV (kv_cache.py)
    sample      sampler.py        penalties, masks, temperature, truncation, draw           -> RunnerOutput (runner.py)
    update      scheduler.py      appends the tokens, publishes or frees blocks             -> SequenceOutput

Pure (ints and lists; no torch, no grpc): sequence, block_pool, block_sharing, block_tables, windows, snapshots, batch,
runner (its contract), scheduler, settings, speculation/.
The step in torch: model_runner, model (the contract), step_input, sampler, penalties, masks, finite, kv_cache.
Models: stored_parameters (what a checkpoint has of them), weights, models/, attention/; partition (weights packed
ahead of time); kernels/ are the CPU's loops, which compiled_code compiles ahead of time (`tandem compile`).
Memory of the machine or GPU: memory and memory_ledger; a worker's share of it for KV: kv_memory.
Cores: cores lends those of an idle worker to its partner.
Several ranks of one worker: ranks/; models/share says what each holds, sharded_kv_cache shows their caches as one.
Loading from settings (runner_settings), each on top of the one before: resolve (reads no weights), load (parts of a
rank), load_runner (one rank, and the drafter), ranks/launch (several).
"""
