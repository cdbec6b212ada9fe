"""The process of one rank. It computes what its worker's rank 0, the leader, commands.

shared_rank.py               a rank that shares memory with the worker that has started it
remote_rank.py, settings.py  a rank that dials in to a worker, from another machine or another GPU of this one
kv.py                        the part of such a rank in transfers of KV: it follows the leader's orders
"""

from mesh.interrupts import end_imports_quietly

end_imports_quietly()
