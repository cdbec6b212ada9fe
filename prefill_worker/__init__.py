"""The prefill worker: computes prompts and sends their KV to decode workers. Start reading at service.py."""

from mesh.interrupts import end_imports_quietly

end_imports_quietly()
