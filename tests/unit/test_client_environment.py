"""A client that cannot be installed: a person's test is skipped, CI's fails."""

from pathlib import Path

import pytest

from tests.client_environment import python_with


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_only_ci_insists(
    ci: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.write_text("a file, so that no environment can be made in it")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match=r"no environment with some-client==1\.0"):
        python_with("some-client==1.0", "some_client")
