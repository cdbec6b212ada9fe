"""The leader of a worker with several ranks: its work beside the engine.

states.py      state and CPU time of ranks on this machine
listener.py    the server into which ranks without shared memory dial
server.py      makes that server; facts on which a worker and such ranks must agree
connection.py  one rank's connection to it
local.py       the processes of such ranks on this machine, as on its GPUs

Ranks that share memory with the leader are in engine/ranks/; the process of a rank is rank_worker/.
"""
