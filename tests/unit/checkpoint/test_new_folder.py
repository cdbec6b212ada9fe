"""Copies of a model's folder."""

from pathlib import Path

from checkpoint.new_folder import copy_other_files


def test_a_copy_has_all_chat_templates_and_no_weights(tmp_path: Path) -> None:
    model, copy = tmp_path / "model", tmp_path / "copy"
    for name in ("config.json", "model.safetensors", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        path = model / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    copy.mkdir()
    copy_other_files(model, copy)
    names = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert names == {"config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"}
