"""Entry point of the `tandem` command. Each subcommand has a module, which is imported when it is chosen.

`tandem generate` therefore starts without the engine that `tandem plan` measures, and `tandem --help` imports no
command. This module itself imports neither the SDK nor rich, which take longer than `--help` may.
"""

import argparse
import errno
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from mesh.domain.errors import ConfigurationError
from mesh.interrupts import accept_signal
from mesh.settings import suggestion
from tandem_cli.parser import Command, CommandParser, complete, shows_all

GROUPS = {
    "serve": {
        "up": "start a mesh on this machine and serve until Ctrl-C",
        "serve": "the same as up",
        "ps": "list the meshes that run on this machine",
        "logs": "show the logs of a mesh's services",
        "stop": "stop a mesh",
    },
    "ask": {
        "generate": "answer one prompt; tokens are coloured by the model's confidence",
        "chat": "talk with the model; Ctrl-C stops an answer, Ctrl-D ends the conversation",
        "batch": "answer a file of requests in OpenAI's batch format, with idle capacity",
    },
    "look inside": {
        "workers": "show the workers and their load",
        "models": "list the served models and their limits",
        "drain": "take workers out of service: they finish their running requests",
        "undrain": "take drained workers back into service",
        "switch": "change the role of a switchable worker: prefill or decode",
        "traffic": "divide requests among revisions of a model",
        "breakdown": "send sample requests and show where their time goes",
    },
    "plan and measure": {
        "plan": "plan capacity: memory, concurrent users, best-case speed, workers, cost",
        "simulate": "run a trace of requests through the real router and modelled workers",
        "bench": "measure speed under load: latency, throughput, goodput and price",
    },
    "prepare": {
        "keys": "create API keys for tenants",
        "convert": "write a checkpoint of PyTorch (.bin), or a model of llama.cpp (GGUF), as safetensors",
        "compile": "compile what a model needs on this machine ahead of its first start",
        "optimize": "try precisions, speculation and workers with your prompts, and write down the best choice",
        "quantize": "make a quantised checkpoint, and compare it with the original",
        "partition": "write a model's weights as workers map them, one file per rank",
        "completion": "print a script for bash, zsh or fish that completes tandem's commands and options",
    },
}
"""All subcommands, with their descriptions, as `tandem --help` groups them."""

COMMANDS = {name: about for commands in GROUPS.values() for name, about in commands.items()}

_MODULES = {
    "serve": "up",
    **dict.fromkeys(("ps", "stop", "logs"), "local_meshes"),
    **dict.fromkeys(("drain", "undrain", "switch"), "workers"),
    "traffic": "models",
}
"""The modules of the commands that do not have one of their name."""


_ADVICE = {
    "ConnectionFailed": "start a mesh with: tandem up; those that run here: tandem ps",
    "Unauthenticated": "set TANDEM_API_KEY",
    "NoWorkers": "see: tandem workers",
    "ModelNotFound": "see: tandem models",
    "Overloaded": "try again a little later",
    "InternalError": "see: tandem logs",
}
"""What a user can do about errors of the SDK, by the name of the error."""

_TLS_ADVICE = (
    "if so, give --tls, or --tls-ca FILE, with --tls-name if the certificate has another name; if not, give neither"
)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import tandem

        try:
            sys.stdout.write(f"tandem {tandem.__version__}\n")
            sys.stdout.flush()
        except OSError as error:
            _discard_stdout()
            parser.exit(1, f"tandem: {error.strerror}\n")
        parser.exit()


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line of this process. `run` of the result is that of the chosen subcommand."""
    argv = sys.argv[1:] if argv is None else argv
    # A shell that completes a command line passes it in a variable.
    words = os.environ["COMP_LINE"].split()[1:] if "COMP_LINE" in os.environ else argv
    chosen = next((word for word in words if not word.startswith("-")), None)
    parser = CommandParser(
        prog="tandem",
        usage="tandem COMMAND [OPTIONS]",
        description="Serves large language models with prefill and decode separated.",
        epilog=_list_commands(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(prog="tandem", metavar="COMMAND", help=argparse.SUPPRESS)
    for name, about in COMMANDS.items():
        subparser = subparsers.add_parser(name, description=about, help=about, show_all=shows_all(words))
        if name == chosen:
            command = _load(name)
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    complete(parser)
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if chosen is not None and chosen not in COMMANDS:
        parser.error(f"there is no command {chosen!r}{suggestion(chosen, COMMANDS)}")
    args = parser.parse_args(argv)
    if chosen is None:
        parser.error("a command is missing")
    return args


def _load(name: str) -> Command:
    """The subcommand, from its module: one of the module's COMMANDS, or else the module's own two functions."""
    module = import_module(f"tandem_cli.{_MODULES.get(name, name)}")
    commands: Mapping[str, Command] = getattr(module, "COMMANDS", {})
    return commands[name] if commands else Command(module.add_arguments, module.run)


def _list_commands() -> str:
    """The commands in groups, as argparse cannot print them."""
    lines: list[str] = []
    for title, commands in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:11} {about}" for name, about in commands.items()), ""]
    return "\n".join([*lines, "tandem COMMAND --help describes a command."])


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` and run the subcommand; returns the exit status."""
    return execute(parse_arguments(argv))


def execute(args: argparse.Namespace) -> int:
    """Run one subcommand. Returns 2 for a wrong configuration, 130 after Ctrl-C, and 1 for any other failure."""
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except ConfigurationError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        accept_signal()
        return 130
    except BrokenPipeError:  # the reader of stdout has gone
        _discard_stdout()
        return 1
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _discard_stdout()
        reason = error.strerror or str(error)
        if reason.startswith("No usable temporary directory"):  # of tempfile, which tries to write
            reason += ": set TMPDIR to a folder that can be written and has room"
        return _fail(f"{error.filename}: {reason}" if error.filename else reason, 1)
    except Exception as error:
        from tandem import TandemError

        if not isinstance(error, TandemError):
            raise
        advice = _TLS_ADVICE if "no secure connection" in str(error) else _ADVICE.get(type(error).__name__)
        return _fail(f"{error}; {advice}" if advice else str(error), 1)
    return status


def _discard_stdout() -> None:
    """Python would report an error when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int) -> int:
    from tandem_cli.terminal import strip_controls

    with suppress(OSError):  # its disk is full
        sys.stderr.write(f"tandem: {strip_controls(' '.join(message.split()))}\n")
    return status
