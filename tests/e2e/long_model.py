"""The bundled model's first layer, with room for 131,072 tokens: long prompts in little time."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

BUNDLED = Path(__file__).resolve().parents[2] / "demo_model" / "tandem-small"
MAX_POSITIONS = 131_072


def write_long_model(folder: Path) -> Path:
    """Write the folder's files and return it."""
    folder.mkdir(parents=True)
    for path in BUNDLED.iterdir():
        if path.name.startswith("tokenizer") or path.suffix == ".jinja" or path.name == "generation_config.json":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((BUNDLED / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "max_position_embeddings": MAX_POSITIONS}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(BUNDLED / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers." not in name or "layers.0." in name}
    save_file(kept, folder / "model.safetensors")
    return folder
