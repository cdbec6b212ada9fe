"""The demo of `make demo`: answers with the model's confidence, and a decode worker that is killed in the middle of one
of them.

It starts a mesh of one prefill and two decode workers with the bundled model, and stops it at the end.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time

import tandem
from rich.console import Console
from tandem.models import confidence
from tandem_cli.terminal import Painter, show_confidence

EASY = "What is 17 + 25?"
# Too hard for the bundled model: the answer is wrong, with low confidence.
HARD = "What is 869 x 671?"
LONG = "Show me the 7 times table."
KILL_AFTER_TOKENS = 30
# The eager decoder needs no kernels compiled for this CPU first.
UP = ("up", "--decode", "2", "--port", "0", "--no-http", "--enforce-eager")


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def ask(client: tandem.Client, question: str, *, kill: bool = False, silent: bool = False) -> list[int]:
    """Stream the answer, each token in the colour of its confidence, and return the token ids."""
    painter, tokens, gaps_s = Painter.of(Console()), [], []
    last_s = time.monotonic()
    for event in client.stream(messages=[{"role": "user", "content": question}], max_new_tokens=200):
        gaps_s.append(time.monotonic() - last_s)
        last_s = time.monotonic()
        if event.token is None:
            continue
        tokens.append(event.token)
        if not silent:
            say(painter.paint(event.token.text, event.token.logprob))
        if kill and len(tokens) == KILL_AFTER_TOKENS:
            say(f" [{kill_decode_worker(client)}] ")
    if not silent:
        say(f"\n  {len(tokens)} tokens, confidence {show_confidence(confidence(tokens) or 0.0)}")
        say(f", longest pause {1000 * max(gaps_s[KILL_AFTER_TOKENS:]):.0f} ms\n" if kill else "\n")
    return [token.id for token in tokens]


def kill_decode_worker(client: tandem.Client) -> str:
    """Kill the process that generates the only running answer, as `kill -9` does."""
    mesh = client.mesh()
    [name] = {trace.places[-1].decode_worker for trace in mesh.running} or {mesh.workers[-1].worker_id}
    [pid] = [worker.pid for worker in mesh.workers if worker.worker_id == name]
    os.kill(pid, signal.SIGKILL)
    return f"kill -9 {pid}: {name} is gone"


def show(client: tandem.Client) -> None:
    say("\nTokens are coloured by the model's confidence in them.\n")
    for question in (EASY, HARD):
        say(f"\n> {question}\n")
        ask(client, question)
    say(f"\n> {LONG}\n")
    interrupted = ask(client, LONG, kill=True)
    undisturbed = ask(client, LONG, silent=True)
    verdict = "the same tokens" if interrupted == undisturbed else "DIFFERENT tokens"
    say(f"  asked again, without a loss: {verdict}\n\n")


def main() -> int:
    """Run the demo; returns the exit status of the mesh."""
    with tempfile.TemporaryDirectory(prefix="tandem-demo-") as logs:
        command = (sys.executable, "-m", "tandem_cli", *UP, "--log-dir", logs)
        mesh = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert mesh.stdout is not None
        ready = mesh.stdout.readline().split()
        try:
            if ready:
                with tandem.Client(ready[1]) as client:
                    show(client)
                say("Serve it yourself: tandem up, and open the page whose address it prints.\n")
        finally:
            mesh.terminate()
            status = mesh.wait()
    return status


if __name__ == "__main__":
    sys.exit(main())
