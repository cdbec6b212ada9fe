"""Recipes: what may be in the file, and what is said of the rest."""

from pathlib import Path

import pytest

from mesh.domain.errors import ConfigurationError
from tandem_cli.main import parse_arguments
from tandem_cli.optimization.candidates import Layout
from tandem_cli.optimization.recipe import Recipe, duration_ms, parse_recipe, read_recipe

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "optimize" / "recipe.toml"


def parsed(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return parse_recipe(path)


def test_the_example() -> None:
    recipe = parse_recipe(EXAMPLE)
    assert recipe.precisions == ("int8", "smoothquant")
    assert recipe.workers == (Layout(1, 1), Layout(0, 1), Layout(0, 2))
    assert (recipe.slo_ttft, recipe.slo_itl) == (2000.0, 200.0)


def test_flags_win(tmp_path: Path) -> None:
    words = ["optimize", "model", "--data", "d.jsonl", "--out", str(tmp_path), "--recipe", str(EXAMPLE)]
    args = parse_arguments([*words, "--slo-ttft", "0.5s", "--max-quality-loss", "2%", "--concurrency", "3"])
    recipe = read_recipe(args)
    assert (recipe.slo_ttft, recipe.slo_itl, recipe.max_quality_loss, recipe.concurrency) == (500.0, 200.0, 0.02, 3)
    assert recipe.speculation == ("none", "ngram")


@pytest.mark.parametrize(("text", "milliseconds"), [("500ms", 500.0), ("0.5s", 500.0), ("2 s", 2000.0)])
def test_durations(text: str, milliseconds: float) -> None:
    assert duration_ms(text) == milliseconds


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("precisions = ['int3']", "there is no precision 'int3'.*known are base, int8, int4"),
        ("precisions = 'int8'", "precisions must be a list of names"),
        ("precisions = []", r"precisions must be a list of names, got \[\]; without the key, all that fit are tried"),
        ("speculation = []", "speculation must be a list of names"),
        ("speculation = ['draft']", "speculation draft needs draft_model"),
        ("speculation = ['guess']", "there is no speculation 'guess'"),
        ("worker = []", "there is no key worker; did you mean workers"),
        ("workers = []", "workers must be a list of tables"),
        ("workers = [{prefill = 1}]", "workers need decode"),
        ("workers = [{decode = 0}]", "decode must be a whole number, got 0"),
        ("slo_ttft = 500", "a duration needs a unit"),
        ("concurrency = 1.5", "concurrency must be a number"),
        ("concurrency = 0", "concurrency must be > 0"),
        ("max_quality_loss = 1", r"max_quality_loss must be in \[0, 1\)"),
        ("draft_model = 3", "draft_model must be a text"),
        ("price_per_hour = -1", "price_per_hour must be > 0"),
        ("= 3", "cannot read the recipe"),
        ("x = " + "[" * 2000, "cannot read the recipe"),
    ],
)
def test_bad_recipes_are_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        parsed(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read the recipe"):
        parse_recipe(tmp_path / "none.toml")


@pytest.mark.parametrize(("flag", "words"), [("--slo-ttft=500", "needs a unit"), ("--max-quality-loss=x", "a share")])
def test_bad_flags_are_named(flag: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["optimize", "model", "--data", "d", "--out", "o", flag])
    assert words in capsys.readouterr().err


def test_a_draft_model_that_is_named_is_tried() -> None:
    assert Recipe().speculations(has_mtp=False) == ("none", "ngram")
    assert Recipe(draft_model="small").speculations(has_mtp=False) == ("none", "ngram", "draft")
    assert Recipe().speculations(has_mtp=True) == ("none", "ngram", "mtp")
    assert Recipe(speculation=("none",)).speculations(has_mtp=True) == ("none",)
