"""Folders with the permission r and without x: their files can be listed, and nothing else."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def test_commands_name_a_folder_that_they_cannot_enter(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder, data, out = tmp_path / "folder", tmp_path / "data.jsonl", tmp_path / "out"
    model = str(checkpoint("llama"))
    shutil.copytree(model, folder)
    (folder / "model.gguf").touch()
    data.write_text('{"prompt": "some words"}\n{"prompt": "others"}\n')
    asked = [f"--data={data}", f"--out={out}"]
    of_model = [
        ["partition", str(folder), str(out)],
        ["convert", str(folder), str(out)],
        ["convert", str(folder / "model.gguf"), str(out)],
        ["quantize", str(folder), str(out), "--scheme=fp8", f"--data={data}"],
        ["optimize", str(folder), *asked],
        ["optimize", model, *asked, f"--draft-model={folder}"],
        ["compile", str(folder)],
        ["plan", str(folder)],
        ["up", str(folder), "--port=0"],
        ["up", model, "--port=0", f"--partition={folder}"],
        ["partition", str(folder / "within"), str(out)],
    ]
    of_out = [
        ["partition", model, str(folder / "out")],
        ["quantize", model, str(folder / "out"), "--scheme=fp8", f"--data={data}"],
        ["optimize", model, f"--data={data}", f"--out={folder}"],
        ["optimize", model, f"--data={data}", f"--out={folder / 'out'}"],
    ]
    folder.chmod(0o444)
    try:
        program = [sys.executable, "-m", "tests.component.weights.unsearchable_folders"]
        commands = json.dumps(of_model + of_out)
        ended = subprocess.run([*program, commands], capture_output=True, text=True, timeout=900, check=True)
    finally:
        folder.chmod(0o755)
    for words, (status, said) in zip(of_model + of_out, json.loads(ended.stdout), strict=True):
        assert status == 2, (words, said)
        last = said.splitlines()[-1]
        assert last.startswith((f"tandem: cannot read {folder}", f"tandem: cannot write {folder}")), (words, said)
        assert "Permission denied" in last, (words, said)
    assert not out.exists()
