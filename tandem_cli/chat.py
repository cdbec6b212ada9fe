"""`tandem chat`: a conversation in the terminal."""

import argparse
import contextlib
import sys
from dataclasses import dataclass, field

from rich.console import Console

import tandem
from mesh.domain.errors import ConfigurationError
from mesh.interrupts import raise_at_each_ctrl_c
from tandem import GenerateArguments
from tandem_cli.connection import add_connection_arguments, add_sampling_arguments, open_client
from tandem_cli.parser import CommandParser
from tandem_cli.terminal import Painter, StreamedAnswer, show_answer, strip_controls

_HELP = "/reset forgets the conversation, /system TEXT sets the system message, /quit ends"


@dataclass
class Conversation:
    """The turns of a chat, oldest first. `/reset` removes all of them and keeps the system message."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    def add_question(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def add_answer(self, text: str) -> None:
        """Add the model's turn. An answer without text removes its question instead, because roles must alternate."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def messages(self) -> list[dict[str, str]]:
        """The messages to send: the system message, if there is one, then all turns."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]


def add_arguments(parser: CommandParser) -> None:
    add_connection_arguments(parser)
    parser.add_argument("--model", help="served model, or a LoRA adapter of one (default: the only model)")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Read and answer lines until /quit or the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then has line editing and history)
    with open_client(args) as client:
        model = client.model(args.model or "", timeout=10)
        if not model.has_chat_template:
            raise ConfigurationError(f"{model.name} has no chat template: use tandem generate --raw")
        sys.stderr.write(f"{model.name}: {_HELP}\n")
        options: GenerateArguments = {
            "model": args.model,
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "seed": args.seed,
        }
        raise_at_each_ctrl_c()
        _converse(client, Conversation(args.system), options)
    return 0


def _converse(client: tandem.Client, conversation: Conversation, options: GenerateArguments) -> None:
    painter = Painter.of(Console())
    while (line := _read_line()) is not None:
        if line.startswith("/"):
            if not command(line, conversation):
                return
        elif line:
            conversation.add_question(line)
            conversation.add_answer(_answer(client, conversation, options, painter))


def command(line: str, conversation: Conversation) -> bool:
    """Run a slash command. Returns False if it ends the conversation."""
    name, _, argument = line.partition(" ")
    if name == "/quit":
        return False
    if name == "/reset":
        conversation.turns.clear()
    elif name == "/system":
        conversation.system = argument.strip()
    else:
        sys.stderr.write(f"there is no {strip_controls(name)}: {_HELP}\n")
    return True


def _read_line() -> str | None:
    """The user's next line, stripped; None at the end of input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            sys.stderr.write("\n(/quit or Ctrl-D ends)\n")


def _answer(client: tandem.Client, conversation: Conversation, options: GenerateArguments, painter: Painter) -> str:
    """Stream one answer to the terminal and return its text. Neither Ctrl-C nor an error ends the conversation."""
    answer = StreamedAnswer()
    arguments = options.copy()
    arguments["messages"] = conversation.messages()
    events = client.stream(**arguments)
    try:
        show_answer(events, answer, painter)
        sys.stderr.write(answer.summary() + "\n")
    except KeyboardInterrupt:
        sys.stderr.write("\n(stopped)\n")
    except tandem.TandemError as error:
        sys.stderr.write(f"\n{strip_controls(str(error))}\n")
    finally:
        events.close()
    return answer.text
