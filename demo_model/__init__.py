"""The bundled demonstration model: its data, its training and its evaluation."""

from mesh.interrupts import end_imports_quietly

end_imports_quietly()
