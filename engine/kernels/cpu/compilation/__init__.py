"""How kernels are compiled: numba and LLVM code, kept on disk, called by address."""
