"""From a checkpoint and settings to a model that runs, each step on top of the one before.

resolve.py             the settings of a runner against its model's config; reads no weights
weights.py             memory-mapped tensors (mapped_files.py) become parameters, or random ones (dummy_weights.py);
                       stored_parameters.py is what a checkpoint has of them, unused_tensors.py what no model reads
partition.py           weights that were packed ahead of time
runner_parts.py        the parts of a runner, as every rank loads them; graphs.py captures decode steps, step_memory.py
                       says how much memory steps take on a GPU
load_runner.py         one rank, and the drafter; engine/ranks/launch.py: several
times.py               seconds of each phase
"""
