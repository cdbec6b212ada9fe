"""What `make demo` runs: a mesh of three processes, a few questions, and a clean stop.

The answers come from the bundled model; each token is coloured by how sure the model was.
"""

import signal
import subprocess
import sys

# The last one is beyond the bundled model: it is wrong, and its confidence shows it.
QUESTIONS = ("What is 17 + 25?", "What is prefill?", "What is 869 x 671?")
TANDEM = (sys.executable, "-m", "cli")


def main() -> int:
    """Start, ask, stop."""
    mesh = subprocess.Popen([*TANDEM, "up", "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert mesh.stdout is not None
    ready = mesh.stdout.readline().split()
    if not ready:
        return mesh.wait()
    address = ready[1]
    try:
        for question in QUESTIONS:
            sys.stdout.write(f"\n> {question}\n")
            sys.stdout.flush()
            subprocess.run([*TANDEM, "generate", question, "--address", address, "--top-logprobs", "2"], check=True)
        subprocess.run([*TANDEM, "workers", "--address", address], check=True)
    finally:
        mesh.send_signal(signal.SIGINT)
    return mesh.wait()


if __name__ == "__main__":
    sys.exit(main())
