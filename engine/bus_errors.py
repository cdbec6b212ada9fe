"""Names the file that was cut off while a process had it mapped.

A read of a page that its file no longer has raises SIGBUS, in any thread and in the middle of any kernel. Python's own
handlers of signals are of no use there: they run after the instruction, which is tried again without end. So the
handler is machine code. It executes `bus_error_report.py` in place of the process: a program that compares the files
with what they were when they were mapped, writes a sentence that names the one that was cut off, and exits with status
2, like any command or service whose configuration is wrong.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm

_REPORT = Path(__file__).with_name("bus_error_report.py")

# Addresses are integers here, because LLVM 15 and later versions write pointers differently. If the program cannot be
# executed, the signal ends the process, as it does without a handler.
_HANDLER = """
declare i32 @execv(i64, i64)
declare i64 @signal(i32, i64)

define void @on_bus_error(i32 %number) {{
  call i32 @execv(i64 {program}, i64 {arguments})
  call i64 @signal(i32 %number, i64 0)
  ret void
}}
"""


def name_if_cut_off(paths: Iterable[Path]) -> None:
    """From now on the process ends with a sentence, not by SIGBUS alone, if it reads pages that one of these files has
    lost. Call it before the files are mapped.
    """
    _handler().add(paths)


class _Handler:
    """The handler of SIGBUS. It is installed for the life of the process."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, int, int, int]] = {}
        words = (sys.executable, "-I", "-S", str(_REPORT), "[]")
        self._arguments = (ctypes.c_char_p * (len(words) + 1))(*(os.fsencode(word) for word in words), None)
        program = ctypes.c_void_p.from_buffer(self._arguments).value  # the address of the first word
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        code = _HANDLER.format(program=program, arguments=ctypes.addressof(self._arguments))
        machine = llvm.Target.from_default_triple().create_target_machine()
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(code), machine)
        self._engine.finalize_object()
        install = ctypes.CDLL(None).signal
        install.restype, install.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        install(signal.SIGBUS, self._engine.get_function_address("on_bus_error"))

    def add(self, paths: Iterable[Path]) -> None:
        before = len(self._files)
        for path in paths:
            try:
                status = path.stat()
            except OSError:  # opening the file raises it
                continue
            state = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            self._files.setdefault(str(path.absolute()), state)
        if len(self._files) > before:
            self._arguments[4] = json.dumps([(path, *state) for path, state in self._files.items()]).encode()


@cache
def _handler() -> _Handler:
    return _Handler()
