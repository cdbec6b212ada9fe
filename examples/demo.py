"""The demo of `make demo`: starts a mesh of three processes, asks some questions, and stops the mesh.

The answers come from the bundled model. Each token is coloured by its confidence.
"""

import signal
import subprocess
import sys

import tandem

# The last question is too hard for the bundled model: the answer is wrong, with low confidence.
QUESTIONS = ("What is 17 + 25?", "What is prefill?", "What is 869 x 671?")
TANDEM = (sys.executable, "-m", "tandem_cli")


def show_logprobs(address: str, question: str) -> None:
    """Ask through the SDK, and print each token of the answer with its log-prob and the best alternative."""
    with tandem.Client(address) as client:
        result = client.generate(messages=[{"role": "user", "content": question}], top_logprobs=2)
    for token in result.tokens:
        runner_up = next(top for top in token.top if top.id != token.id)
        sys.stdout.write(
            f"  {token.text!r:8} {token.logprob:7.3f}   or {runner_up.text!r:8} {runner_up.logprob:7.3f}\n"
        )
    sys.stdout.write(f"  finish_reason {result.finish_reason}, confidence {result.confidence:.2f}\n\n")
    sys.stdout.flush()


def main() -> int:
    """Run the demo; returns the exit status of the mesh."""
    mesh = subprocess.Popen([*TANDEM, "up", "--port", "0", "--allow-anonymous"], stdout=subprocess.PIPE, text=True)
    assert mesh.stdout is not None
    ready = mesh.stdout.readline().split()
    if not ready:
        return mesh.wait()
    address = ready[1]
    try:
        for question in QUESTIONS:
            sys.stdout.write(f"\n> {question}\n")
            sys.stdout.flush()
            subprocess.run([*TANDEM, "generate", question, "--address", address], check=True)
        show_logprobs(address, QUESTIONS[-1])
        subprocess.run([*TANDEM, "workers", "--address", address], check=True)
    finally:
        mesh.send_signal(signal.SIGINT)
    return mesh.wait()


if __name__ == "__main__":
    sys.exit(main())
