"""The decode worker: receives KV, generates tokens in a continuous batch, and computes prompts that come without KV.

service.py     the worker's logic: the life of a sequence; start reading here
session.py     one connected router: its sequences, and the events to be sent to it
servicer.py    the gRPC service in front of both
role.py        limits on the engine, and the services of the role
settings.py    its settings, beside those of every worker (worker/settings.py)
"""

from mesh.interrupts import end_imports_quietly

end_imports_quietly()
