"""`tandem convert MODEL.gguf OUT`: configuration, weights and tokenizer are those that the file was made from."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedModel

from checkpoint.gguf.architectures import ARCHITECTURES
from checkpoint.gguf.file import GgufFile, open_gguf
from checkpoint.gguf.members import Metadata
from checkpoint.gguf.tokenizer import _WORDS
from checkpoint.model_facts import read_model_facts
from checkpoint.partition_manifest import MANIFEST
from checkpoint.source import ModelSource
from checkpoint.tokenizer_files import load_tokenizer
from engine.loading.load_runner import load_model_runner
from engine.models.read_config import load_config
from engine.quantizer.shards import ShardWriter
from mesh.domain.errors import ConfigurationError
from tandem_cli.main import main
from tandem_cli.model_files.convert_folder import convert_folder
from tandem_cli.model_files.convert_gguf import convert_gguf
from tandem_cli.model_files.model_folders import find_model
from tests.component.arms import settings
from tests.component.checkpoints import (
    FAMILIES,
    OTHER_FAMILIES,
    build_checkpoint,
    llama_like,
    randomise,
    save_tokenizer,
)
from tests.component.parity import check_parity
from tests.component.remote_families import one_by_one
from tests.component.test_tokenizer_files import TEXTS
from tests.component.weights.gguf_files import write_gguf, write_sentencepiece
from tests.fakes.tokenizers import TEXT, write_llama

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GEMMA = {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 32}
_SIGMOID = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    name: (FAMILIES | OTHER_FAMILIES)[name]
    for name in (
        *("llama", "llama-tied", "llama-biases", "llama-multi-query", "llama-linear", "llama-yarn", "qwen2", "qwen3"),
        *("qwen3-moe", "gemma", "phi3", "phi3-longrope", "phi", "granite", "stablelm", "gpt2", "gpt-bigcode", "bloom"),
        *("falcon-7b", "falcon-40b", "falcon-11b", "gpt-neox", "gpt-neox-sequential", "jais2"),
    )
}
MODELS |= {
    "llama3": lambda: llama_like("llama", rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "mixtral": lambda: llama_like("mixtral", num_local_experts=4),
    "qwen2-moe": lambda: llama_like(
        "qwen2_moe", num_experts=8, moe_intermediate_size=32, shared_expert_intermediate_size=48
    ),
    "starcoder2": lambda: llama_like("starcoder2"),
    "smollm3": lambda: llama_like("smollm3", num_hidden_layers=5),
    "arcee": lambda: llama_like("arcee"),
    "ernie4-5": lambda: llama_like("ernie4_5", head_dim=32, tie_word_embeddings=False),
    "seed-oss": lambda: llama_like("seed_oss", head_dim=32),
    "glm4": lambda: llama_like("glm4", head_dim=32, pad_token_id=None, attention_bias=True),
    "hunyuan": lambda: llama_like("hunyuan_v1_dense", head_dim=32),
    "olmo2": lambda: llama_like("olmo2"),
    "exaone4": lambda: llama_like("exaone4", sliding_window=None, layer_types=["full_attention"] * 3),
    "exaone4-windows": lambda: llama_like("exaone4", num_hidden_layers=5, sliding_window=12),
    "glm4-moe": lambda: llama_like("glm4_moe", **_SIGMOID, head_dim=32, use_qk_norm=True, pad_token_id=None),
    "dots1": lambda: llama_like("dots1", **_SIGMOID, num_key_value_heads=4, sliding_window=None),
    "ernie4-5-moe": lambda: llama_like(
        "ernie4_5_moe", moe_num_experts=8, moe_k=3, moe_intermediate_size=32, tie_word_embeddings=False
    ),
    "olmoe": lambda: llama_like(
        "olmoe", num_key_value_heads=4, num_experts=8, num_experts_per_tok=3, intermediate_size=32
    ),
    "lfm2-moe": lambda: llama_like(
        "lfm2_moe",
        layer_types=["conv", "full_attention", "conv"],
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        num_dense_layers=1,
    ),
    "lfm2": lambda: llama_like(
        "lfm2",
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
        intermediate_size=96,
        tie_word_embeddings=False,
    ),
    "gemma2": lambda: llama_like("gemma2", **_GEMMA),
    "gemma3": lambda: llama_like("gemma3_text", num_hidden_layers=7, rope_local_base_freq=10_000.0, **_GEMMA),
}
KNOWN_TO_TRANSFORMERS = {
    *("llama", "llama-tied", "llama-multi-query", "qwen2", "gemma2", "phi3"),
    *("gpt2", "bloom", "falcon-7b", "stablelm", "starcoder2"),
}


def write_model(model: PreTrainedModel, folder: Path) -> Path:
    torch.manual_seed(0)
    randomise(model)
    model.tie_weights()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", [*MODELS, "exaone", "minicpm", "ling2"])
def test_a_model_becomes_what_it_was(name: str, tmp_path: Path) -> None:
    model_dir, out = tmp_path / "model", tmp_path / "out"
    if name in MODELS:
        write_model(MODELS[name](), model_dir)
    else:  # transformers has no class for it
        build_checkpoint(name, model_dir)
    path = write_gguf(model_dir, tmp_path / "model.gguf")
    assert main(["convert", str(path), str(out)]) == 0
    assert load_config(out) == load_config(model_dir)
    found, wanted = weights(out), weights(model_dir)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=0.0, atol=3e-7 if "gemma" in name else 0.0, msg=key)
    assert read_model_facts(out).eos_token_ids == read_model_facts(model_dir).eos_token_ids
    if name in KNOWN_TO_TRANSFORMERS:  # whose reader is not ours: the file is one that others read
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).state_dict()
        for key, tensor in found.items():
            torch.testing.assert_close(theirs[key], tensor, rtol=0.0, atol=3e-7, msg=key)


def test_layers_of_multi_token_prediction_are_kept(tmp_path: Path) -> None:
    model_dir, out = tmp_path / "model", tmp_path / "out"
    build_checkpoint("glm4-moe-mtp", model_dir)
    tensors = one_by_one(weights(model_dir))
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    assert main(["convert", str(write_gguf(model_dir, tmp_path / "model.gguf")), str(out)]) == 0
    assert load_config(out) == load_config(model_dir)
    found = weights(out)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert any("eh_proj" in name for name in found)


def test_commands_convert_a_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir, cache = write_model(llama_like("llama"), tmp_path / "model"), tmp_path / "cache"
    path = write_gguf(model_dir, tmp_path / "small.gguf")
    source = ModelSource(str(path), cache_dir=str(cache))
    assert source.short_name == "small"
    folder = find_model(source)
    assert load_config(folder) == load_config(model_dir)
    assert str(folder) in capsys.readouterr().err
    assert find_model(source) == folder
    assert not capsys.readouterr().err
    write_gguf(model_dir, path, "Q8_0")
    assert find_model(source) != folder
    with pytest.raises(ConfigurationError, match="there is no file"):
        find_model(ModelSource(str(tmp_path / "other.gguf"), cache_dir=str(cache)))


@pytest.mark.parametrize(
    ("kind", "dtype", "most"),
    [("BF16", "bfloat16", 0.0), ("F16", "float16", 0.0), ("Q8_0", "bfloat16", 0.02), ("Q4_0", "bfloat16", 0.15)],
)
def test_quantised_matrices_are_dequantised(kind: str, dtype: str, most: float, tmp_path: Path) -> None:
    """`most`: how far a matrix may lie from the original, as a share of it."""
    model = llama_like("llama", hidden_size=128).to(getattr(torch, dtype))
    model_dir, out = write_model(model, tmp_path / "model"), tmp_path / "out"
    path = write_gguf(model_dir, tmp_path / "model.gguf", kind)
    assert main(["convert", str(path), str(out), "--dequantize"]) == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    for key, wanted in weights(model_dir).items():
        found = weights(out)[key]
        assert found.dtype == getattr(torch, dtype)
        distance = (found.float() - wanted.float()).norm() / wanted.float().norm()
        assert distance <= (most if wanted.ndim > 1 else 0.0), key


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_old_files_become_what_they_were(name: str, tmp_path: Path) -> None:
    """Each expert has tensors of its own, and the embedding is there twice."""
    model_dir, out = write_model(MODELS[name](), tmp_path / "model"), tmp_path / "out"
    path = write_gguf(model_dir, tmp_path / "model.gguf", is_from_2023=True)
    assert main(["convert", str(path), str(out)]) == 0
    assert load_config(out) == load_config(model_dir)
    found, wanted = weights(out), weights(model_dir)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize("name", ["llama3", "mixtral", "qwen2-moe", "falcon-40b", "granite", "gpt2", "lfm2", "glm4"])
def test_what_is_converted_is_served(name: str, tmp_path: Path) -> None:
    model_dir, out = write_model(MODELS[name](), tmp_path / "model"), tmp_path / "out"
    main(["convert", str(write_gguf(model_dir, tmp_path / "model.gguf")), str(out)])
    check_parity(model_dir, load_model_runner(settings(out)))


def byte_level(words: str, folder: Path) -> Path:
    """A checkpoint whose tokenizer has learnt merges and cuts words as `words` says; returns the folder."""
    pattern, digits = _WORDS[words], [pre_tokenizers.Digits(individual_digits=True)] if words == "smollm" else []
    cut = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    tokenizer = Tokenizer(BPE(ignore_merges=words in ("llama-bpe", "tekken")))
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, *cut, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, TEXT], trainer)
    write_model(llama_like("llama", vocab_size=512), folder)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("gpt-2", "gpt-2"),
        ("olmo", "gpt-2"),
        ("smollm", "smollm"),
        ("refact", "smollm"),
        ("llama-bpe", "llama-bpe"),
        ("falcon3", "llama-bpe"),
        ("glm4", "llama-bpe"),
        ("qwen2", "qwen2"),
        ("deepseek-r1-qwen", "qwen2"),
        ("stablelm2", "qwen2"),
        ("tekken", "tekken"),
    ],
)
def test_texts_have_their_ids(words: str, same: str, tmp_path: Path) -> None:
    """`same` is the best-known name of the pattern."""
    model_dir, out = byte_level(same, tmp_path / "model"), tmp_path / "out"
    assert main(["convert", str(write_gguf(model_dir, tmp_path / "model.gguf", words=words)), str(out)]) == 0
    ours, original = load_tokenizer(out), Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for text in [*TEXTS, "<s>a<think>b</s>", "it's 123456 O'Neill\r\n\r\n  x"]:
        text = text if words not in ("qwen2", "deepseek-r1-qwen") else text.replace("e\u0301", "é")  # which NFC does
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=True), text
    begins = (
        [original.token_to_id("<s>")] if words in ("llama-bpe", "falcon3", "tekken") else []
    )  # the file does not say
    assert ours.encode("a").ids == begins + original.encode("a", add_special_tokens=False).ids
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"]


def test_texts_have_their_ids_in_sentencepiece(tmp_path: Path) -> None:
    """But for a space at the beginning, which transformers takes for the one that is put there."""
    model_dir = write_model(llama_like("llama", vocab_size=512), tmp_path / "model")
    write_llama(model_dir)
    (model_dir / "tokenizer.json").unlink()
    path, out = write_sentencepiece(model_dir, tmp_path / "model.gguf"), tmp_path / "out"
    assert main(["convert", str(path), str(out)]) == 0
    ours = load_tokenizer(out)
    theirs: Any = sentencepiece.SentencePieceProcessor(model_file=str(model_dir / "tokenizer.model"))
    for text in (text for text in TEXTS[:8] if not text.startswith(" ")):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text), text
    assert ours.encode("a").ids[0] == theirs.bos_id()


def test_a_tokenizer_may_be_that_of_the_original(tmp_path: Path) -> None:
    model_dir, out = write_model(MODELS["llama"](), tmp_path / "model"), tmp_path / "out"
    path = write_gguf(model_dir, tmp_path / "model.gguf", words="unheard-of")
    with pytest.raises(ConfigurationError, match=r"cuts words as unheard-of.*--tokenizer FOLDER"):
        convert_gguf(path, out, None)
    assert not out.exists()
    assert main(["convert", str(path), str(out), "--tokenizer", str(model_dir)]) == 0
    assert (out / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()
    assert load_config(out) == load_config(model_dir)


def test_the_end_of_answers_is_that_of_the_original(tmp_path: Path) -> None:
    """Its config.json may say it alone. What describes its weights is left out."""
    model_dir, out = write_model(MODELS["llama"](), tmp_path / "model"), tmp_path / "out"
    path = write_gguf(model_dir, tmp_path / "model.gguf")
    (model_dir / "generation_config.json").unlink()
    stated = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(stated | {"eos_token_id": [7, 9]}))
    for name in ("quantize_config.json", "hf_quant_config.json", MANIFEST):
        (model_dir / name).write_text("{}")
    assert main(["convert", str(path), str(out), "--tokenizer", str(model_dir)]) == 0
    assert read_model_facts(out).eos_token_ids == {7, 9}
    assert not {"quantize_config.json", "hf_quant_config.json", MANIFEST} & {file.name for file in out.iterdir()}


def test_tokens_that_end_a_turn_are_known_by_name(tmp_path: Path) -> None:
    """As in llama.cpp: files of Gemma and Phi 3 name one end token, and not that of a turn."""
    model_dir, out = write_model(MODELS["llama"](), tmp_path / "model"), tmp_path / "out"
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.add_special_tokens(["<end_of_turn>", "<start_of_turn>"])
    tokenizer.add_tokens(["<|end|>"])
    tokenizer.save(str(model_dir / "tokenizer.json"))
    assert main(["convert", str(write_gguf(model_dir, tmp_path / "model.gguf")), str(out)]) == 0
    ends = {tokenizer.token_to_id(token) for token in ("</s>", "<end_of_turn>", "<|end|>")}
    assert read_model_facts(out).eos_token_ids == ends


@pytest.mark.parametrize(("architecture", "caps"), [("gemma2", (50.0, 30.0)), ("gemma3", (None, None))])
def test_caps_that_the_first_files_of_gemma_2_do_not_say(architecture: str, caps: object, tmp_path: Path) -> None:
    """They are those of llama.cpp, and of the model."""
    metadata = Metadata(GgufFile(tmp_path, {"general.architecture": architecture}, {}))
    sizes = {"num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8, "head_dim": 256}
    config = ARCHITECTURES[architecture].facts(metadata, sizes)
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == caps


def test_bad_files_are_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir = write_model(MODELS["llama"](), tmp_path / "model")
    whole = write_gguf(model_dir, tmp_path / "model.gguf").read_bytes()
    bad = tmp_path / "bad.gguf"
    for content in (b"", b"GGUF", b"PK" + whole[2:], whole[:200], whole[: len(whole) // 2]):
        bad.write_bytes(content)
        with pytest.raises(ConfigurationError, match="truncated or no GGUF file"):
            open_gguf(bad)
    part = tmp_path / "model-00001-of-00002.gguf"
    part.write_bytes(whole)
    with pytest.raises(ConfigurationError, match=r"there is no file .*model-00002-of-00002\.gguf"):
        open_gguf(part)
    with pytest.raises(ConfigurationError, match="run tandem convert"):
        ModelSource(str(tmp_path / "model.gguf")).locate()
    assert main(["convert", str(model_dir), str(tmp_path / "out"), "--tokenizer", str(model_dir)]) == 2
    assert "--tokenizer is for files in GGUF" in capsys.readouterr().err


def test_names_in_capitals_and_folders_with_a_file_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "M-00001-of-00001.GGUF"
    model_dir = write_model(MODELS["llama"](), tmp_path / "model")
    write_gguf(model_dir, path)
    with pytest.raises(ConfigurationError, match=f"in llama.cpp's format: run tandem convert {path} OUT"):
        ModelSource(str(path)).locate()
    for wrong in (lambda: ModelSource(str(tmp_path)).locate(), lambda: convert_folder(tmp_path, tmp_path / "out")):
        with pytest.raises(ConfigurationError, match=f"; {path.name} is in .*: run tandem convert {path} OUT"):
            wrong()
    assert main(["convert", str(path), str(tmp_path / "out"), "--tokenizer", str(model_dir)]) == 0
    assert "serve it with: tandem up" in capsys.readouterr().out


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    model_dir = write_model(MODELS["llama"](), tmp_path / "model")
    path = write_gguf(model_dir, tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"lLaMa"))
    with pytest.raises(ConfigurationError, match="architecture lLaMa; those that are read: llama, qwen2, qwen2moe"):
        convert_gguf(path, tmp_path / "out", None)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.block_count", "three", "metadata has a wrong type or value: ValueError"),
        ("llama.attention.key_length", [16], "metadata has a wrong type or value: TypeError"),
        ("llama.attention.head_count", [], "metadata has a wrong type or value: IndexError"),
        ("llama.attention.head_count_kv", -1, "KV heads -1 are not read"),
        ("llama.attention.head_count_kv", [2, 4, 4], r"KV heads \[2, 4, 4\] are not read: all layers with attention"),
        ("tokenizer.ggml.tokens", 3, "metadata has a wrong type or value: TypeError"),
        ("tokenizer.ggml.merges", ["a b"], "its merges do not fit its tokens: .*`ab` out of vocabulary"),
        ("tokenizer.ggml.eos_token_id", [257], "metadata has a wrong type or value: TypeError"),
    ],
)
def test_metadata_of_a_wrong_type_is_named(
    key: str, value: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(write_model(MODELS["llama"](), tmp_path / "model"), tmp_path / "model.gguf")
    file = open_gguf(path)
    damaged = GgufFile(path, {**file.metadata, key: value}, file.tensors)
    monkeypatch.setattr("tandem_cli.model_files.convert_gguf.open_gguf", lambda _: damaged)
    with pytest.raises(ConfigurationError, match=f"{path}: .*{words}"):
        convert_gguf(path, tmp_path / "out", None)
    if key.endswith("eos_token_id"):  # beside a tokenizer that names no end of an answer
        (tmp_path / "model" / "generation_config.json").unlink()
        with pytest.raises(ConfigurationError, match=f"{path}: .*{words}"):
            convert_gguf(path, tmp_path / "out", tmp_path / "model")
    assert not (tmp_path / "out").exists()


def test_layers_of_lfm2_must_say_which_have_attention(tmp_path: Path) -> None:
    metadata = Metadata(GgufFile(tmp_path, {"general.architecture": "lfm2", "lfm2.attention.head_count_kv": 2}, {}))
    with pytest.raises(ConfigurationError, match="must say for each layer of LFM2 whether it has attention"):
        ARCHITECTURES["lfm2"].facts(metadata, {})


def test_a_count_of_nothing_is_named(tmp_path: Path) -> None:
    path = write_gguf(write_model(MODELS["llama"](), tmp_path / "model"), tmp_path / "model.gguf")
    content, key = path.read_bytes(), b"llama.attention.head_count"
    at = content.index(key) + len(key) + 4  # after the type of the value
    path.write_bytes(content[:at] + bytes(4) + content[at + 4 :])
    with pytest.raises(ConfigurationError, match=r"says llama\.attention\.head_count 0, which must be at least 1"):
        convert_gguf(path, tmp_path / "out", None)


def test_tensors_that_overlap_are_named(tmp_path: Path) -> None:
    """One of two has the other's numbers, which nobody would notice."""
    path = write_gguf(write_model(MODELS["llama"](), tmp_path / "model"), tmp_path / "model.gguf")
    content, key = bytearray(path.read_bytes()), b"blk.0.attn_q.weight"
    at = content.index(key) + len(key) + 24  # after the dimensions and the type
    other = content.index(b"blk.1.attn_q.weight") + len(key) + 24
    content[at : at + 8] = content[other : other + 8]
    path.write_bytes(content)
    with pytest.raises(
        ConfigurationError, match=r"damaged: tensor blk\.[01]\.attn_q.weight overlaps blk\.[01]\.attn_q"
    ):
        open_gguf(path)


def test_a_tensor_without_numbers_is_named(tmp_path: Path) -> None:
    path = write_gguf(write_model(MODELS["llama"](), tmp_path / "model"), tmp_path / "model.gguf")
    content, key = path.read_bytes(), b"blk.0.attn_q.weight"
    at = content.index(key) + len(key) + 4  # after the number of its dimensions
    path.write_bytes(content[:at] + struct.pack("<QQ", 2**59, 0) + content[at + 16 :])
    with pytest.raises(ConfigurationError, match=r"tensor blk\.0\.attn_q\.weight has no numbers, in shape"):
        convert_gguf(path, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_numbers_are_those_of_the_package(tmp_path: Path) -> None:
    model_dir = write_model(MODELS["llama"](), tmp_path / "model")
    file = open_gguf(write_gguf(model_dir, tmp_path / "model.gguf", "Q8_0"))
    stored = weights(model_dir)["model.embed_tokens.weight"].numpy()
    assert np.abs(file.read("token_embd.weight") - stored).max() <= np.abs(stored).max() / 127


def test_a_file_that_changes_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(write_model(MODELS["llama"](), tmp_path / "model"), tmp_path / "model.gguf")
    add = ShardWriter.add

    def add_and_change(writer: ShardWriter, name: str, tensor: torch.Tensor) -> None:
        add(writer, name, tensor)
        os.utime(path, ns=(0, 0))

    monkeypatch.setattr(ShardWriter, "add", add_and_change)
    with pytest.raises(
        ConfigurationError, match=rf"^{path} has changed since the run began, so nothing is written: run"
    ):
        convert_gguf(path, tmp_path / "out", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.gguf"]


def test_a_broken_file_beside_a_tokenizer_is_named(tmp_path: Path) -> None:
    model_dir = write_model(MODELS["llama"](), tmp_path / "model")
    path = write_gguf(model_dir, tmp_path / "model.gguf")
    (model_dir / "generation_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=rf"^{model_dir}/generation_config.json is not valid JSON"):
        convert_gguf(path, tmp_path / "out", model_dir)
    assert not (tmp_path / "out").exists()
