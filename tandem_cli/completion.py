"""`tandem completion`: lets a shell complete the commands and options of `tandem`."""

import argparse
import sys

from tandem_cli.parser import CommandParser

_SETUP = {
    "bash": 'eval "$(tandem completion bash)"    in ~/.bashrc',
    "zsh": 'eval "$(tandem completion zsh)"    in ~/.zshrc, after compinit',
    "fish": "tandem completion fish | source    in ~/.config/fish/config.fish",
}
"""The line for the settings of each shell, and their file."""


def add_arguments(parser: CommandParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["to have it in every new shell:", *(f"  {line}" for line in _SETUP.values())])
    parser.add_argument("shell", choices=_SETUP, help="the shell to print it for")


def run(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    sys.stdout.write(shellcode(["tandem"], shell=args.shell) + "\n")
    return 0
