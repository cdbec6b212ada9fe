"""Loads a user's model.py, and provides the modules of djl_python, so that handlers written for LMI run unchanged."""

import ast
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gateway.handler import inputs, outputs
from mesh.domain.errors import ConfigurationError

Function = Callable[..., Any]
_MARK = "_tandem_formatter"
_LMIS_MODELS = ("init_handler", "prediction_handler")


@dataclass(frozen=True, slots=True)
class UserCode:
    """The functions of model.py: `handle`, or formatters around the built-in answer."""

    handle: Function | None
    input_formatter: Function | None
    output_formatter: Function | None

    @property
    def parts(self) -> list[str]:
        """Names of the functions that model.py has."""
        return [name for name in ("handle", "input_formatter", "output_formatter") if getattr(self, name) is not None]


def load_user_code(path: Path, function_name: str) -> UserCode:
    """Import the file. Raises ConfigurationError if it has no function to call, or whatever the file raises."""
    _install_djl_python()
    spec = importlib.util.spec_from_file_location("model", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigurationError(f"the handler {path} does not exist")
    _refuse_handlers_of_lmis_models(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["model"] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    marked = {getattr(value, _MARK): value for value in vars(module).values() if hasattr(value, _MARK)}
    handle = getattr(module, function_name, None)
    code = UserCode(handle, marked.get("input_formatter"), marked.get("output_formatter"))
    if not code.parts:
        raise ConfigurationError(f"{path} has no function {function_name}, and no formatter")
    return code


def _refuse_handlers_of_lmis_models(path: Path) -> None:
    """Refuse LMI's decorators by name, before the file runs: the modules that they come from vary."""
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            name = ast.unparse(decorator).rpartition(".")[2]
            if name in _LMIS_MODELS:
                raise ConfigurationError(
                    f"{path}: @{name} is for models that LMI loads itself, such as scikit-learn's: write a handle"
                )


def _marks(kind: str) -> Function:
    def decorate(function: Function) -> Function:
        setattr(function, _MARK, kind)
        return function

    return decorate


def _install_djl_python() -> None:
    """Register modules for `from djl_python import Input, Output` and the other imports of handlers."""
    modules: dict[str, dict[str, Any]] = {
        "djl_python": {"Input": inputs.Input, "Output": outputs.Output},
        "djl_python.inputs": {"Input": inputs.Input},
        "djl_python.outputs": {"Output": outputs.Output},
        "djl_python.input_parser": {"input_formatter": _marks("input_formatter")},
        "djl_python.output_formatter": {"output_formatter": _marks("output_formatter")},
        "djl_python.async_utils": {
            "create_non_stream_output": outputs.create_non_stream_output,
            "create_stream_chunk_output": outputs.create_stream_chunk_output,
        },
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
    vars(sys.modules["djl_python"])["__path__"] = []
