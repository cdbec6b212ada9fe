"""Creates an environment per engine: python -m bench.peers.install openvino vllm [--envs .peers].

Environments are separate from Tandem and from each other. All use the CPU build of torch, so pip needs an index that
has it. llamacpp is compiled for this CPU, which needs cmake and a C++ compiler, and takes a while.
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from bench.peers.catalog import ENGINES, Engine, interpreter
from mesh.interrupts import run_program

_REQUIRED = """
import json, sys
from importlib.metadata import requires
print(json.dumps(requires(sys.argv[1]) or []))
"""


def select_requirements(requirements: Sequence[str], leave_out: Sequence[str]) -> list[str]:
    """The requirements of a package, without those of its extras and without those in `leave_out`."""
    return [
        requirement
        for requirement in requirements
        if "extra ==" not in requirement and not requirement.startswith(tuple(leave_out) or "\0")
    ]


def install(name: str, engine: Engine, envs: Path) -> None:
    """Install the pinned packages of an engine. With `leave_out`, its first package is installed without
    dependencies.
    """
    python = interpreter(envs, name)
    venv.create(envs / name, with_pip=True)
    _run(python, "-m", "pip", "install", "-q", "--upgrade", "pip")
    environ = os.environ | dict(engine.build_environ)
    if engine.leave_out:
        first = engine.requirements[0]
        _run(python, "-m", "pip", "install", "--no-deps", first)
        listed = subprocess.run(
            [str(python), "-c", _REQUIRED, first.partition("==")[0]], check=True, capture_output=True, text=True
        )
        requirements = select_requirements(json.loads(listed.stdout), engine.leave_out)
        _run(python, "-m", "pip", "install", *requirements, *engine.requirements[1:])
    else:
        _run(python, "-m", "pip", "install", *engine.requirements, environ=environ)


def _run(*line: str | Path, environ: dict[str, str] | None = None) -> None:
    subprocess.run([str(part) for part in line], check=True, env=environ)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.install", description=__doc__.split("\n\n")[0])
    parser.add_argument("engines", nargs="+", choices=sorted(ENGINES))
    parser.add_argument("--envs", type=Path, default=Path(".peers"))
    options = parser.parse_args()
    for name in options.engines:
        print(f"installing {name} into {options.envs / name}", file=sys.stderr, flush=True)
        install(name, ENGINES[name], options.envs)


if __name__ == "__main__":
    run_program(main)
