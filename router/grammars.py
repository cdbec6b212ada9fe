"""Structures are tried before anything is done for a request, so that a bad one is refused at once, in words."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mesh.domain.errors import InvalidRequest
from mesh.domain.structure import Structure
from mesh.grammar import GrammarCompiler


class Grammars:
    """Compiles structures as workers will, on a thread of its own. Close it at the end."""

    def __init__(self, model_dir: Path, *, disabled: bool = False) -> None:
        self._compiler = GrammarCompiler(model_dir)
        self._disabled = disabled
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def check(self, structure: Structure | None) -> None:
        """Raises InvalidRequest if workers could not keep to it."""
        if structure is None:
            return
        if self._disabled:
            raise InvalidRequest("structured output is turned off here: disable_grammar_support is set")
        await asyncio.get_running_loop().run_in_executor(self._pool, self._compiler.compile, structure)

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)
