"""Settings: precedence, origins, and errors that say what to do."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from mesh.domain.errors import ConfigurationError
from mesh.settings import load_settings, setting
from switchable_worker.settings import SwitchableSettings


@dataclass(frozen=True)
class Example:
    port: int = setting(1, "a port", env=("PORT",))
    fast: bool = setting(False, "a switch")
    ratio: float | None = setting(None, "a share")
    key: str = setting("", "a secret", secret=True)


def load(argv: list[str], environ: dict[str, str] | None = None):
    return load_settings(Example, argv, prog="client", environ=environ or {})


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text("port = 4\nratio = 0.5\n[client]\nport = 5\n[router]\nport = 6\n")
    config = ["--config", str(file)]
    assert load([]).values.port == 1
    assert load(config).values == Example(port=5, ratio=0.5)
    assert load(config, {"PORT": "7"}).origins["port"] == "environment PORT"
    assert load(config, {"PORT": "7", "TANDEM_PORT": "8"}).values.port == 8
    assert load([*config, "--port", "9"], {"PORT": "7"}).origins["port"] == "flag --port"


@pytest.mark.parametrize(
    "line", ["port = 1.9", "port = true", "ratio = true", "fast = 2", "port = [1]", "[client]\nport = nan"]
)
def test_a_value_of_another_type_in_a_file_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text(line)
    with pytest.raises(ConfigurationError, match="must be"):
        load(["--config", str(file)])


def test_lists_and_numbers_in_a_file_are_texts_where_flags_have_texts(tmp_path: Path) -> None:
    file = tmp_path / "tandem.toml"
    for value, text in (('["a", "b"]', "a,b"), ("2", "2"), ("true", "true"), ("{x = 1}", '{"x": 1}')):
        file.write_text(f"[client]\nkey = {value}\n")
        assert load(["--config", str(file)]).values.key == text


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text("port = 4\n", encoding="utf-8-sig")
    assert load(["--config", str(file)]).values.port == 4


def test_empty_environment_counts_as_unset() -> None:
    assert load([], {"TANDEM_PORT": ""}).origins["port"] == "default"


def test_secrets_have_no_flag_and_are_not_shown() -> None:
    resolved = load([], {"TANDEM_KEY": "hush"})
    assert resolved.values.key == "hush"
    assert "hush" not in str(resolved.describe())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot=1"], "there is no option --prot; did you mean --port? (see: python -m client --help)\n"),
        (["--key", "hush"], "there is no option --key, which other users would see; set TANDEM_KEY, or write it into"),
        (["1"], "unexpected argument '1'"),
    ],
)
def test_wrong_words_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        load(argv)
    said = capsys.readouterr().err
    assert message in said
    assert "hush" not in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--port", "x"], {}, "port must be int, got 'x' .from flag --port"),
        ([], {"TANDEM_FAST": "maybe"}, "fast must be bool"),
        (["--config", "/no/such.toml"], {}, "cannot read the settings file"),
    ],
)
def test_errors_name_setting_and_origin(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(argv, environ)


def test_bare_boolean_flag_means_true() -> None:
    assert load(["--fast"]).values.fast is True
    assert load(["--fast", "false"]).values.fast is False


def test_a_switchable_worker_has_the_tables_of_both_roles(tmp_path: Path) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text(
        'model = "m"\nregistry_address = "r:1"\n[prefill]\nmax_num_prompts = 3\n[decode_worker]\nblock_size = 8\n'
        '[switchable_worker]\nrole = "prefill"\n'
    )
    flags = ["--config", str(file)]
    values = load_settings(SwitchableSettings, flags, prog="switchable_worker", environ={}).values
    assert (values.max_num_prompts, values.block_size, values.role) == (3, 8, "prefill")
    file.write_text(file.read_text() + "[prefill_worker]\nblock_size = 16\n")
    with pytest.raises(
        ConfigurationError, match=r"block_size in \[prefill_worker\] and in \[decode_worker\], with diff"
    ):
        load_settings(SwitchableSettings, flags, prog="switchable_worker", environ={})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--role", "router"], "role must be prefill or decode, got 'router'"),
        (["--rank-listen", "127.0.0.1:0", "--tensor-parallel", "2"], "rank_listen does not fit a switchable worker"),
        (["--max-num-prompts", "0"], "max_num_prompts must be >= 1"),
        (["--max-step-tokens", "0"], "max_step_tokens must be >= 1"),
    ],
)
def test_settings_that_no_switchable_worker_can_have(flags: list[str], said: str) -> None:
    own = ["--model", "m", "--registry-address", "r:1"]
    with pytest.raises(ConfigurationError, match=said):
        load_settings(SwitchableSettings, [*own, *flags], prog="switchable_worker", environ={})
