"""What `make demo` runs: a mesh of three processes, a few questions, and a clean stop.

The answers come from the bundled model; each token is coloured by how sure the model was.
"""

import signal
import subprocess
import sys

import tandem

# The last one is beyond the bundled model: it is wrong, and its confidence shows it.
QUESTIONS = ("What is 17 + 25?", "What is prefill?", "What is 869 x 671?")
TANDEM = (sys.executable, "-m", "cli")


def show_logprobs(address: str, question: str) -> None:
    """The last answer once more, through the SDK: each token with its log-prob and the runner-up."""
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
    """Start, ask, stop."""
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
