"""The text side of one model: prompts, structures and chat templates, with their threads and the template's process."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpoint.grammar import GrammarCompiler
from mesh.domain.errors import InvalidRequest
from mesh.domain.request import Structure
from router.served_model import ServedModel
from router.text.prompts import PromptEncoder
from router.text.template_process import TemplateProcess


class ModelText:
    """Owns the threads and the template process. Call `start` once, and `close` at the end.

    Tokenize calls have an encoder of their own, so that they and generation never wait for each other.
    """

    def __init__(self, model: ServedModel, model_dir: Path, *, disable_grammars: bool = False) -> None:
        self.model = model
        self._templates = None if model.chat_template is None else TemplateProcess(model.chat_template)
        self.encoder = PromptEncoder(model, self._templates)
        self.tokenize_encoder = PromptEncoder(model, self._templates)
        self.grammars = Grammars(model_dir, disabled=disable_grammars)

    async def start(self) -> None:
        """Start the template process. Raises ConfigurationError if the chat template cannot be compiled."""
        if self._templates is not None:
            await asyncio.to_thread(self._templates.start)

    def close(self) -> None:
        """Stop the threads and the template process. No request may run any more."""
        self.encoder.close()
        self.tokenize_encoder.close()
        if self._templates is not None:
            self._templates.close()
        self.grammars.close()


class Grammars:
    """Compiles structures on a thread of its own, as workers will, so that a bad structure is refused at once."""

    def __init__(self, model_dir: Path, *, disabled: bool = False) -> None:
        self._compiler = GrammarCompiler(model_dir)
        self._disabled = disabled
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def check(self, structure: Structure | None, tenant: str = "") -> None:
        """Raise InvalidRequest if workers could not compile the structure.

        Timing reveals nothing about other tenants: a structure that only they have used is compiled again.
        """
        if structure is None:
            return
        if self._disabled:
            raise InvalidRequest("structured output is turned off here: disable_grammar_support is set")
        await asyncio.get_running_loop().run_in_executor(self._pool, self._compiler.compile, structure, tenant)

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)
