"""Whatever stands in the environment or a file: settings, or a ConfigurationError."""

import contextlib
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import ConfigurationError
from mesh.settings import load_settings
from router.settings import RouterSettings
from router.tenants import ApiKeys, digest_of
from tests.unit.fuzz.mutations import fuzzed_slowly, near
from worker.settings import WorkerSettings

NAMES = sorted({each.name for cls in (RouterSettings, WorkerSettings) for each in fields(cls)})
VALUES = st.one_of(
    st.text(max_size=20), st.sampled_from(["-1", "0", "1e999", "nan", "inf", "true", "1_0", "٣", ".", "\x00", "9" * 30])
)
FILES = [
    b'model = "."\nport = 50051\n[router]\ngrace_s = 1.5\nallow_anonymous = true\n',
    b"router = 5\nport = inf\n",
    b"[[router]]\nport = 1979-05-27\n",
]
KEYS = [f'{digest_of("a")} = {{ tenant = "alice", operator = true, max_concurrent_requests = 3 }}\n'.encode()]


@pytest.mark.parametrize("cls", [RouterSettings, WorkerSettings])
def test_environment(cls: type) -> None:
    @fuzzed_slowly
    @given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5))
    def check(given_values: dict[str, str]) -> None:
        required = {"TANDEM_MODEL": ".", "TANDEM_REGISTRY_ADDRESS": "a:1"}
        environ = required | {f"TANDEM_{name.upper()}": value for name, value in given_values.items()}
        with contextlib.suppress(ConfigurationError):
            load_settings(cls, [], prog="router", environ=environ)

    check()


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"

    @fuzzed_slowly
    @given(near(FILES))
    def check(raw: bytes) -> None:
        file.write_bytes(raw)
        with contextlib.suppress(ConfigurationError):
            load_settings(RouterSettings, ["--config", str(file)], prog="router", environ={"TANDEM_MODEL": "."})

    check()


def test_keys_files(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"

    @fuzzed_slowly
    @given(near(KEYS))
    def check(raw: bytes) -> None:
        file.write_bytes(raw)
        with contextlib.suppress(ConfigurationError):
            ApiKeys.load(file)

    check()
