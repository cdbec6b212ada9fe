"""The engine: runs one model, on GPUs or CPUs, of one machine or several.

A scheduler without tensors plans, a model runner without policy computes. Several processes, the ranks, may compute a
step together, each on a GPU or cores of its own (ranks/); scheduler and sampler know nothing of them.

Life of a step (`Engine.step` in engine.py, which a thread of loop.py repeats):

    commands    loop.py           add, reserve, commit and abort run between two steps
    schedule    scheduler.py      picks sequences, token counts, blocks (kv/)             -> ScheduledBatch (batch.py)
    draft       speculation/      optional: appends draft tokens to sequences that decode
    build       step_input.py     flattens the batch to plain arrays                      -> StepInput
    forward     model_runner.py   models/ and attention/ compute hidden states and write KV (kv/)
    sample      sampling/         penalties, masks, temperature, truncation, draw         -> RunnerOutput (runner.py)
    update      scheduler.py      appends the tokens, publishes or frees blocks           -> SequenceOutput

Pure (ints and lists; no torch, no grpc): sequence, batch, runner (its contract), scheduler, prompt_pace (limits prompts
beside decodes), settings, speculation/, and the block pool and block tables in kv/.
The step in torch: model_runner, model (the contract), step_input, device_copies (host to GPU and back), decode_graphs
(CUDA graphs), finite (NaN and infinity), sampling/, the cache in kv/. adapter_slots: LoRA adapters in memory.
Models: models/, attention/; kernels/ are the CPU's loops, which compiled_code compiles ahead (`tandem compile`).
Loading from settings (runner_settings): loading/; devices; quantized_formats/ reads quantised checkpoints, quantizer/
makes them; bus_errors names a file that is cut off while it is mapped.
Memory of the machine or GPU: memory, memory_ledger; a worker's share of it for KV: kv/budget.
Cores: cores lends those of an idle worker to its partner.
Several ranks of one worker: ranks/; models/share says what each holds, kv/sharded_cache shows their caches as one.
"""
