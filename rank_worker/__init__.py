"""The process of one rank. It computes what its worker's rank 0, the leader, commands.

serving.py               a rank that shares memory with the worker that has started it
joining.py, settings.py  a rank that dials in to a worker, from another machine or another GPU of this one
lifetime.py              the end of a rank with the worker that has started it
"""

from mesh.interrupts import end_imports_quietly

end_imports_quietly()
