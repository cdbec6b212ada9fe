import json
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.errors import ConfigurationError
from tandem_cli.capacity.model_size import ModelSize
from tandem_cli.capacity.roofline import Capacity, DeviceRates, Precision
from tandem_cli.simulation.profile import MeshProfile, StepTimes, at, best_case
from tests.unit.simulation.profiles import TIMES, profile

TABLE = ((10, 1.0), (20, 1.5), (40, 3.5))


@pytest.mark.parametrize(
    ("rows", "seconds"), [(10, 1.0), (15, 1.25), (20, 1.5), (30, 2.5), (60, 5.5), (4, 0.7), (0, 0.5)]
)
def test_between_and_beyond_the_points(rows: int, seconds: float) -> None:
    assert at(TABLE, rows) == pytest.approx(seconds)


def test_one_point_is_a_constant() -> None:
    assert at(((8, 2.0),), 100) == 2.0


def test_times_of_a_step() -> None:
    assert TIMES.decode(6, 1000) == pytest.approx(0.015 + 0.001)
    assert TIMES.prompts(300, 10_000) == pytest.approx(0.3 + 0.01)
    # The table's line goes through 0.05 s at least, which a step of decodes has spent already.
    assert TIMES.both(0.015, 0.3) == pytest.approx(0.015 + 0.25)


@pytest.mark.parametrize("table", [(), ((0, 1.0),), ((2, 1.0), (1, 2.0)), ((1, 0.0),)])
def test_bad_tables_are_refused(table: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigurationError, match="prompt_s must have pairs of rows"):
        StepTimes(prompt_s=table, decode_s=TABLE)


def test_a_profile_is_saved_and_loaded(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    profile().save(file)
    assert MeshProfile.load(file) == profile()


def test_a_bad_profile_names_the_field(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    profile().save(file)
    saved = json.loads(file.read_text())
    saved["decode"]["num_blocks"] = "many"
    file.write_text(json.dumps(saved))
    with pytest.raises(ConfigurationError, match=r"is no profile of a mesh: decode\.num_blocks"):
        MeshProfile.load(file)
    file.write_text("{")
    with pytest.raises(ConfigurationError, match="is no profile of a mesh: Invalid JSON"):
        MeshProfile.load(file)
    with pytest.raises(ConfigurationError, match="cannot read"):
        MeshProfile.load(tmp_path / "none")


def test_the_best_case_is_that_of_the_formulas() -> None:
    size = ModelSize(1000, 100, 10, tied=True, num_layers=2, num_heads=4, num_kv_heads=1, head_dim=8)
    rates = DeviceRates(1e6, bandwidth_bytes_per_s=1000, flops_per_s=8000, attention_flops_per_s=4000)
    capacity = Capacity(size, Precision("float32", "float32"), rates)
    found = best_case(capacity, "toy", 2048, link_gbit_per_s=1)
    times = found.decode.times
    assert times.decode(8, 8 * 500) == pytest.approx(capacity.decode_step_s(8, 500))
    assert times.prompts(256, 0) == pytest.approx(capacity.prefill_s(256))
    assert found.decode.num_blocks == capacity.kv_tokens // 16
    assert found.transfer_token_s == pytest.approx(capacity.transfer_s(1, 1e9 / 8))
    with pytest.raises(ConfigurationError, match="do not fit"):
        best_case(replace(capacity, device=replace(rates, memory_bytes=100)), "toy", 2048, 1)
