"""A worker that can prefill and decode, one at a time: it changes its role without loading the model anew.

It has nothing of its own but settings: the roles are those of prefill_worker and decode_worker, over one engine."""

from mesh.interrupts import end_imports_quietly

end_imports_quietly()
