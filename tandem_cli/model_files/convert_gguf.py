"""`tandem convert` of a file in GGUF, the format of llama.cpp."""

import json
import sys
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch

from checkpoint.config_json import read_config, require_searchable
from checkpoint.files import copy_other_files, require_other_files
from checkpoint.gguf.file import GgufFile, gguf_parts, open_gguf
from checkpoint.gguf.models import GgufModel
from checkpoint.gguf.tokenizer import generation_config, write_tokenizer
from checkpoint.new_folder import new_folder
from checkpoint.partition_manifest import MANIFEST
from checkpoint.tokenizer_files import load_tokenizer
from checkpoint.tokenizer_fingerprint import tokenizer_source
from checkpoint.watched_files import WatchedFiles
from engine.bus_errors import name_if_cut_off
from engine.quantized_formats.gguf_config import GGUF_TYPES, gguf_config
from engine.quantizer.shards import ShardWriter

_OF_ITS_WEIGHTS = ("quantize_config.json", "hf_quant_config.json", MANIFEST)
"""Files that describe the weights beside a tokenizer, which are not those of the file in GGUF."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that floats keep beside blocks: norms and routers of experts, and matrices that no blocks fit."""
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def convert_gguf(path: Path, out: Path, tokenizer: Path | None, *, dequantizes: bool = False) -> int:
    """`tandem convert`: see `write_folder`. Returns the exit status. Raises ConfigurationError."""
    began_s = time.monotonic()
    made = write_folder(path, out, tokenizer, dequantizes=dequantizes)
    sys.stdout.write(
        f"{out}: {made} in {time.monotonic() - began_s:.1f} s; serve it with: tandem up {quote(str(out))}\n"
    )
    return 0


def converted_once(path: Path, cache: Path) -> Path:
    """The folder in `cache` that a file becomes when it is first asked for. Raises ConfigurationError."""
    parts = gguf_parts(path)
    stats = [(str(part.resolve()), (found := part.stat()).st_size, found.st_mtime_ns) for part in parts]
    folder = cache / "gguf" / f"{path.stem}-{blake2b(repr(stats).encode(), digest_size=8).hexdigest()}"
    if not folder.exists():
        sys.stderr.write(f"tandem: {path} becomes the folder {folder}, once\n")
        write_folder(path, folder, None)
    return folder


def write_folder(path: Path, out: Path, tokenizer: Path | None, *, dequantizes: bool = False) -> str:
    """Write the model in `path` to the folder `out` as Hugging Face does. Matrices keep the blocks of the file, if they
    are of a type in GGUF_TYPES; others, or all if it `dequantizes`, are floats. The tokenizer is that of the checkpoint
    folder `tokenizer`, or the one that the file describes. Returns a summary. Raises ConfigurationError.
    """
    require_searchable(path.parent)
    files = WatchedFiles.of(gguf_parts(path))
    name_if_cut_off(gguf_parts(path))
    file = open_gguf(path)
    with file.naming_bad_metadata():
        model = GgufModel(file)
        config = model.config()
    dtype = getattr(torch, model.dtype)
    own = {} if dequantizes or not model.is_quantized else _FLOATS
    with new_folder(out) as unfinished, files.watching():
        if tokenizer is None:
            with file.naming_bad_metadata():
                write_tokenizer(file, unfinished)
                _write_json(unfinished / "generation_config.json", generation_config(file))
        else:
            require_searchable(tokenizer)
            tokenizer_source(tokenizer)  # which raises if there is none
            require_other_files(tokenizer)
            copy_other_files(tokenizer, unfinished, but=_OF_ITS_WEIGHTS)
            _keep_end_tokens(tokenizer, file, unfinished)
        load_tokenizer(unfinished)
        writer, modules, dtypes = ShardWriter(unfinished), dict[str, list[str]](), set[torch.dtype]()
        for name, kind, numbers in model.tensors(() if dequantizes else GGUF_TYPES):
            files.require_unchanged()
            if numbers.dtype == np.uint8:
                modules.setdefault(kind, []).append(name.removesuffix(".weight"))
                writer.add(name, torch.tensor(numbers))
            else:
                writer.add(name, floats := torch.tensor(numbers, dtype=own.get(kind, dtype)))
                dtypes.add(floats.dtype)
        writer.finish()
        quantization = {"quantization_config": gguf_config(modules)} if modules else {}
        _write_json(unfinished / "config.json", config | quantization)
    types = [*sorted(modules), *sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)]
    return f"{len(writer.names)} tensors in {', '.join(types)}, {writer.num_bytes / 1e6:.0f} MB"


def _keep_end_tokens(folder: Path, file: GgufFile, out: Path) -> None:
    """Write generation_config.json, if `folder` has none: its config.json, which may name the tokens that end an
    answer, is not copied.
    """
    path = out / "generation_config.json"
    if path.exists():
        return
    stated = read_config(folder) if (folder / "config.json").exists() else {}
    ids = {key: stated[key] for key in _SPECIAL_IDS if stated.get(key) is not None}
    with file.naming_bad_metadata():
        _write_json(path, generation_config(file) | ids)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
