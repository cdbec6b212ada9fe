"""From a checkpoint and settings to a model that runs, each step on top of the one before.

resolve.py             the settings of a runner against its model's config; reads no weights
weights.py             memory-mapped tensors (mapped_files.py) become parameters, or random ones (dummy_values.py);
                       stored_parameters.py is what a checkpoint has of them, unused_tensors.py what no model reads;
                       grouped_matrices.py takes some that are stored in groups as they are, ternary.py ternary ones
partition.py           weights that were packed ahead of time
memory_needs.py        how much memory weights take, and how many KV blocks fit beside them; activation_memory.py: what
                       steps take on a GPU
runner_parts.py        the parts of a runner, as every rank loads them; graphs.py captures decode steps
load_runner.py         one rank, and the drafter; engine/ranks/launch.py: several
load_phases.py         seconds of each phase
"""
