"""The prefill worker: computes prompts and sends their KV to decode workers.

service.py     the worker's logic: the life of a prompt; start reading here
servicer.py    the gRPC service in front of it
role.py        limits on the engine, and the services of the role
settings.py    its settings, beside those of every worker (worker/settings.py)
"""

from mesh.interrupts import end_imports_quietly

end_imports_quietly()
