"""The decode worker: receives KV, generates tokens in a continuous batch, and computes prompts that come without KV.

Start reading at service.py.
"""

from mesh.interrupts import end_imports_quietly

end_imports_quietly()
