"""Tensor and pipeline parallelism: ranks, the processes that compute each step of one worker together.

rank.py                one rank: its weights, its KV, its part of a step; graphs.py captures its decode steps
launch.py              starts the ranks of one machine; messages.py is what ranks and the leader say to each other
divided_cores.py       the cores and threads of the process that has started ranks
shared.py              the memory that ranks of one machine map; commands.py is what begins their work
collectives.py         sums over ranks, and residuals between stages, by torch.distributed, for the eager decoder
remote.py              ranks that share no memory, on GPUs or several machines
"""
