"""`serve`, as SageMaker calls it in a container: which `tandem serve` it becomes."""

import os
import subprocess
from pathlib import Path

import pytest

SERVE = Path(__file__).resolve().parents[3] / "deploy" / "sagemaker" / "serve"
TANDEM = """#!/bin/sh
echo "$TANDEM_HTTP_HOST:$TANDEM_HTTP_PORT" "$@"
"""
OPEN = "--set=gateway.allow_anonymous=true"


def serve(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it with a `tandem` that only prints."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "tandem").write_text(TANDEM)
    (programs / "tandem").chmod(0o755)
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "SM_MODEL_DIR": str(folder), **variables}
    return subprocess.run((str(SERVE), *arguments), env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("files", "variables", "expected"),
    [
        (("config.json",), {}, "0.0.0.0:8080 serve {open} --model={folder}"),
        (
            ("config.json", "serving.properties"),
            {},
            "0.0.0.0:8080 serve {open} --serving-properties={folder}/serving.properties",
        ),
        (("config.json",), {"SAGEMAKER_BIND_TO_PORT": "9000"}, "0.0.0.0:9000 serve {open} --model={folder}"),
        ((), {"HF_MODEL_ID": "org/name"}, "0.0.0.0:8080 serve {open}"),
        (("config.json",), {"OPTION_MODEL_ID": "s3://bucket/m"}, "0.0.0.0:8080 serve {open}"),
        (("config.json",), {"TANDEM_HTTP_HOST": "::", "TANDEM_HTTP_PORT": "1"}, ":::1 serve {open} --model={folder}"),
    ],
)
def test_files_and_variables_say_what_is_served(
    files: tuple[str, ...], variables: dict[str, str], expected: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    done = serve(tmp_path, **variables)
    assert done.stdout == expected.format(folder=tmp_path, open=OPEN) + "\n"
    assert done.returncode == 0


def test_arguments_are_passed_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert serve(tmp_path, "--decode", "2").stdout.endswith(f"--model={tmp_path} --decode 2\n")


def test_without_a_model_it_says_where_one_belongs(tmp_path: Path) -> None:
    done = serve(tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path} has neither serving.properties nor config.json" in done.stderr
