from mesh.interrupts import end_imports_quietly

end_imports_quietly()
