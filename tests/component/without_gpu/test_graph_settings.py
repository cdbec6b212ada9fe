"""Which decode steps are captured as CUDA graphs, and the memory that is kept free for them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_worker.settings import DecodeSettings
from engine.decode_graphs import step_shapes
from engine.loading.graphs import graph_bytes, why_no_graphs, why_not_captured
from engine.loading.resolve import kv_layout
from engine.models.decoder import Decoder
from engine.models.expert_products import why_not_on_device
from engine.models.read_config import load_config
from engine.settings import NO_GRAPHS, GraphSettings, graph_sizes
from mesh.domain.errors import ConfigurationError
from tests.component.arms import settings
from tests.component.encoder_decoders import build_encoder_decoder
from tests.component.without_gpu.test_decode_graphs import load

USUAL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@pytest.mark.parametrize(
    ("value", "max_num_seqs", "sizes"),
    [
        ("auto", 64, USUAL[:9]),
        ("auto", 1, (1,)),
        ("auto", 33, USUAL[:8]),
        ("auto", 1000, USUAL),
        ("0", 64, ()),
        ("1,2,4", 64, (1, 2, 4)),
        (" 8, 1,2 , 8", 64, (1, 2, 8)),
        ("1,2,4,8,16", 3, (1, 2, 4)),
    ],
)
def test_sizes(value: str, max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(value, max_num_seqs) == sizes


@pytest.mark.parametrize("value", ["", "none", "1,two", "0,1", "-1", "1,", "1.5"])
def test_wrong_sizes_are_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cuda_graphs must be auto, batch sizes such as 1,2,4,8, or 0"):
        DecodeSettings(model="m", registry_address="none", cuda_graphs=value)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {}, None),
        ("llama", {"device": "cpu"}, "for cuda, not cpu"),
        ("llama", {"graphs": NO_GRAPHS}, "cuda_graphs is 0"),
        ("llama", {"tensor_parallel": 2}, None),
        ("llama", {"pipeline_parallel": 2}, "from stage to stage"),
        ("mixtral", {}, None),
        ("t5", {}, "encoder-decoder"),
    ],
)
def test_graphs_are_captured_on_cuda_only_and_counted_then(
    checkpoint: Callable[[str], Path], tmp_path: Path, family: str, changes: dict[str, Any], reason: str | None
) -> None:
    model_dir = build_encoder_decoder(family, tmp_path) if family == "t5" else checkpoint(family)
    graphs = GraphSettings((1, 2, 4), 512)
    wanted = settings(model_dir, **{"device": "cuda", "dtype": "float16", "graphs": graphs} | changes)
    config = load_config(model_dir, wanted.rope)
    given, layout = why_no_graphs(wanted, config), kv_layout(config, replace(wanted, device="cpu"))
    num_bytes = graph_bytes(wanted, config, layout)
    if reason is None:
        assert given is None
        assert num_bytes > layout.block_bytes
        for more in (GraphSettings((1, 2, 4, 8), 1024), GraphSettings((1, 2, 4), 512, max_drafts=3)):
            assert graph_bytes(replace(wanted, graphs=more), config, layout) > num_bytes
    else:
        assert given is not None
        assert reason in given
        assert num_bytes == 0


def test_experts_are_captured_unless_the_host_selects_them(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does with torch's attention, which is not captured anyway."""
    model = load(checkpoint("mixtral"), None).model
    assert isinstance(model, Decoder)
    wanted = settings(checkpoint("mixtral"), device="cuda", graphs=GraphSettings((1, 2, 4), 512))
    assert why_not_captured(wanted, model) == "attention backend torch reads lengths on the host"
    monkeypatch.setattr("engine.loading.graphs._CAPTURED_ATTENTION", ("torch",))
    assert why_not_captured(wanted, model) == (
        "experts are selected on the host: attention backend torch does without Triton"
    )
    model.why_experts_on_host = None
    assert why_not_captured(wanted, model) is None


def test_why_experts_are_selected_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_on_device("torch", torch.device("cuda")) == "attention backend torch does without Triton"
    assert "CUDA" in str(why_not_on_device("triton", torch.device("cpu")))
    monkeypatch.setattr("engine.attention.triton_paged.find_spec", lambda name: None)
    assert why_not_on_device("flash", torch.device("cuda")) == "Triton is not installed"


def test_what_is_captured_is_the_largest_first() -> None:
    assert step_shapes((1, 4), 0) == [(4, 1), (1, 1)]
    assert step_shapes((1, 4), 3) == [(4, 4), (4, 1), (1, 4), (1, 1)]


@pytest.mark.parametrize(
    ("asked", "drafts"), [({}, 0), ({"speculative": "ngram"}, None), ({"num_speculative_tokens": 7}, 7)]
)
def test_drafts_are_captured_where_there_are_any(asked: dict[str, Any], drafts: int | None) -> None:
    speculation = DecodeSettings(model="m", registry_address="none", **asked).speculation()
    assert speculation.max_drafts == drafts if drafts is not None else speculation.max_drafts > 0
