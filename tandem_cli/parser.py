"""The parser of every command: argparse, with errors of one line that say what was probably meant; types of values."""

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mesh.settings import BARE, flag_name, flag_options, is_bool, suggestion

_COMPLETION = "_ARGCOMPLETE"
"""The variable that a shell sets to complete a command line."""


class Command(NamedTuple):
    """A subcommand: it declares its arguments, then runs with their values and returns the exit status."""

    add_arguments: Callable[["CommandParser"], None]
    run: Callable[[argparse.Namespace], int]


class CommandParser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage text, and refuses abbreviations.

    With `show_all`, `--help` has rare options too.
    """

    def __init__(self, *, show_all: bool = False, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._show_all = show_all
        self._switches: set[str] = set()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see: {self.prog} --help)\n")

    def add_help_all(self) -> None:
        """Declare `--help-all`, for a command with rare options."""
        self.add_argument("--help-all", action="help", help="show the other options too")

    def add_setting(
        self,
        setting: Field[Any],
        *,
        group: argparse._ArgumentGroup | None = None,
        is_rare: bool = False,
        note: str = "",
        **options: Any,
    ) -> None:
        """Declare the flag of `setting`, in `group` if there is one. Without the flag, the namespace lacks the name.

        `note` is added to the help text. `options` are argparse's and take precedence.
        """
        flag = flag_name(setting.name)
        declared = {"default": argparse.SUPPRESS, **flag_options(setting, note), **options}
        if setting.type is bool:
            self._switches.add(flag)
        if is_rare:
            self.add_rare(flag, group=group, **declared)
        else:
            (group or self).add_argument(flag, **declared)

    def add_rare(self, flag: str, *, group: argparse._ArgumentGroup | None = None, **options: Any) -> None:
        """Declare an option that only `--help-all` shows."""
        if not self._show_all:
            options["help"] = argparse.SUPPRESS
        (group or self).add_argument(flag, **options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Like argparse's, which calls it for subcommands too, but unknown words are errors of this parser."""
        words = None if args is None else self._with_bare_switches(args)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._describe_unknown(unknown[0]))
        return parsed, []

    def _with_bare_switches(self, words: Sequence[str]) -> list[str]:
        """Give switches whose next word is no value an explicit one: argparse would take the model of `--colocated
        MODEL` for the value.
        """
        pairs = zip_longest(words, words[1:], fillvalue="")
        return [f"{word}={BARE}" if word in self._switches and not is_bool(after) else word for word, after in pairs]

    def _describe_unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}"
        option = word.partition("=")[0]
        return f"there is no option {option}{self._own_word(option) or suggestion(option, self._option_string_actions)}"

    def _own_word(self, option: str) -> str:
        """The flag to write for an option of vLLM or TGI; "" for others, and where this command has nothing for it."""
        from tandem_cli.configuration.low_code_keys import knob_of  # here: chains of imports stay short

        knob = knob_of(option)
        if knob is None or "--serving-properties" not in self._option_string_actions:
            return ""
        flags = dict.fromkeys(flag_name(target.partition(".")[2]) for target in knob.targets)
        if not flags and knob.note:
            return f", which would have no effect: {knob.note}"
        return f"; here it is {' and '.join(flags)}" if flags.keys() <= self._option_string_actions.keys() else ""


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The settings of these names that the command line has; see `add_setting`."""
    return {name: getattr(args, name) for name in names if name in args}


def positive(text: str) -> float:
    """The type of arguments that are numbers above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be > 0, got {text}")
    return value


def not_negative(text: str) -> float:
    """The type of arguments that are numbers, 0 among them."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be >= 0, got {text}")
    return value


def count(text: str) -> int:
    """The type of arguments that are whole numbers above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {text}")
    return value


def whole(text: str) -> int:
    """The type of arguments that are whole numbers, 0 among them."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be >= 0, got {text}")
    return value


def output_file(text: str) -> Path:
    """The type of files for results. A path that cannot be written is refused before the work begins."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {path}: it is a folder")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}")
    return path


def shows_all(words: Sequence[str]) -> bool:
    """Whether rare options are shown: for `--help-all`, and for a shell that completes a command line."""
    return "--help-all" in words or _COMPLETION in os.environ


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that completes a command line, and exit; do nothing otherwise."""
    if _COMPLETION in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
