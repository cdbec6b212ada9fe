"""The work of `tandem optimize`: puts the parts together, from the user's files to OUT."""

import argparse
import fcntl
import json
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from shlex import quote
from tempfile import TemporaryFile
from typing import Any

from rich.table import Table

from checkpoint.files import checkpoint_files
from checkpoint.new_folder import FULL
from checkpoint.source import ModelSource
from checkpoint.watched_files import WatchedFiles
from engine.loading.resolve import fingerprint
from mesh.domain.errors import ConfigurationError
from mesh.logs import quiet_logs
from tandem_cli.load_test.figures import RunFailed
from tandem_cli.load_test.report import describe_machine
from tandem_cli.model_files.model_folders import find_model
from tandem_cli.optimization.candidate_trial import CandidateTrial
from tandem_cli.optimization.candidates import STORED, Candidate
from tandem_cli.optimization.choice import CandidateResult, choose
from tandem_cli.optimization.progress import ShownProgress
from tandem_cli.optimization.questions import Question, digest_of, load_judge, read_questions
from tandem_cli.optimization.recipe import Recipe, read_recipe
from tandem_cli.optimization.result import (
    PROPERTIES,
    SearchOutcome,
    cells,
    headings,
    plot_svg,
    properties_of,
    publish,
    report_json,
    report_markdown,
    rows_of,
    summary,
)
from tandem_cli.optimization.search import Search, State
from tandem_cli.optimization.subject import Checkpoints, Subject
from tandem_cli.terminal import FittingTable, error_console, progress_bar, wide_console

_WORK = "work"


def optimize(args: argparse.Namespace) -> int:
    """Search, and write OUT. Returns 1 if no candidate keeps all limits, or the base cannot be served."""
    recipe = read_recipe(args)
    if recipe.draft_model:
        recipe = replace(recipe, draft_model=str(find_model(ModelSource(recipe.draft_model)).absolute()))
    questions = read_questions(args.data, recipe.output_tokens)
    judge = None if args.judge is None else load_judge(args.judge)
    console = error_console()
    with quiet_logs(logging.ERROR):
        files = _watched(args.model, recipe)  # before anything of them is read
        subject = Subject.open(args.model, questions)
        demand = subject.demand(questions, recipe.concurrency)
        checkpoints = Checkpoints(subject.folder, subject.calibration(recipe.max_prompts), args.out / _WORK)
        tried, pruned = subject.candidates(recipe, demand, checkpoints.require)
        state = State.open(args.out / "state.json", _about(args, recipe, subject, questions), tried)
        _require_writable(args.out)
        console.print(f"{len(tried)} candidates, {len(questions)} prompts, {recipe.concurrency} at once")
        try:
            with only_run(state, args.out / _WORK), progress_bar(console) as bar:
                progress = ShownProgress(bar)
                trial = CandidateTrial(
                    recipe.max_prompts, subject, recipe, questions, demand, checkpoints, judge, state, progress
                )
                search = Search(tried, recipe, len(questions), trial.measure, trial.assess, state, progress, files)
                final = search.run()
                outcome = _outcome(args.model, recipe, search, final, pruned)
                _write(args.out, outcome, trial, state)
        except (KeyboardInterrupt, SystemExit):
            console.print("interrupted: the same command goes on where it was", soft_wrap=True)
            raise
        except OSError as error:
            advice = "; once there is room, the same command goes on" if error.errno in FULL else ""
            raise ConfigurationError(f"cannot write {args.out}: {error}{advice}") from error
        except RunFailed as error:
            sys.stderr.write(f"tandem: {tried[0].name} cannot be served: {error}\n")
            return 1
    _show(outcome, args)
    return 0 if outcome.choice is not None else 1


def _watched(model: str, recipe: Recipe) -> WatchedFiles:
    """The files of the model and of the draft model, as they are now. Raises ConfigurationError."""
    drafts = [Path(recipe.draft_model)] if recipe.draft_model else []
    folders = [find_model(ModelSource(model)), *drafts]
    return WatchedFiles.of(path for folder in folders for path in checkpoint_files(folder))


@contextmanager
def only_run(state: State, work: Path) -> Iterator[None]:
    """Keep other runs from the same OUT: both would save their state and make their checkpoints there. The system
    releases the lock however the process ends. Raises ConfigurationError, and OSError if it cannot write.
    """
    if not state.path.exists():
        state.save()  # before `work` is there: a folder without it is taken for somebody else's
    work.mkdir(exist_ok=True)
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"another run is writing {work.parent}: wait for its end, or choose another folder for --out"
            ) from error
        yield


def _require_writable(out: Path) -> None:
    """Raise ConfigurationError, before anything is measured, if nothing can be written to OUT. Creates the folder."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigurationError(f"cannot write {out}: {error.strerror or error}: choose another --out") from error


def _about(args: argparse.Namespace, recipe: Recipe, subject: Subject, questions: Sequence[Question]) -> dict[str, Any]:
    """All that figures and quality depend on. Limits and candidates may change: figures stay true then."""
    judge = "" if args.judge is None else blake2b(args.judge.read_bytes(), digest_size=16).hexdigest()
    machine = describe_machine()
    return {
        **subject.other_files(),
        "model": fingerprint(subject.folder),
        "data": digest_of(questions),
        "judge": judge,
        "draft model": recipe.draft_model and fingerprint(Path(recipe.draft_model)),
        "concurrency": recipe.concurrency,
        "max_prompts": recipe.max_prompts,
        "machine": [machine["cpu"], machine["cores_allowed"], subject.machine.device],
        "version": machine["tandem"],
    }


def _outcome(
    model: str, recipe: Recipe, search: Search, final: Sequence[CandidateResult], pruned: dict[Candidate, str]
) -> SearchOutcome:
    state = search.state
    choice = choose([result for result in final if search.why_not(result) is None])
    names = {candidate.name for candidate in search.candidates}
    results = [result for name, result in state.results.items() if name in names]
    untried = {candidate.name: reason for candidate, reason in (pruned | search.skipped).items()}
    for candidate in search.candidates:
        if candidate.name not in state.results and candidate.name not in untried:
            untried[candidate.name] = "without speculation it was not among the better half"
    rows = rows_of(results, state.quality, choice, recipe)
    base = state.results[search.candidates[0].name]
    about = describe_machine() | {"prompts": search.num_questions, "concurrency": recipe.concurrency}
    return SearchOutcome(model, about, recipe, rows, base, choice, untried)


def _write(out: Path, outcome: SearchOutcome, trial: CandidateTrial, state: State) -> None:
    """Write OUT, in place of the files of an earlier choice. If the disk is full, nothing of the new choice is left,
    and neither is a report. Raises OSError.
    """
    reports = {
        "report.json": json.dumps(report_json(outcome), indent=2) + "\n",
        "plot.svg": plot_svg(outcome),
        "report.md": report_markdown(outcome),
    }
    for name in (*state.published, *reports):
        (out / name).unlink(missing_ok=True)
    state.published = []
    try:
        for name, text in reports.items():
            (out / name).write_text(text)
        if outcome.choice is not None:
            candidate = outcome.choice.result.candidate
            is_own = candidate.precision in STORED
            reference = "" if is_own else _reference(outcome.model, trial)
            publish(trial.folder(candidate.precision) if is_own else None, out, state.published)
            state.published.append(PROPERTIES)
            (out / PROPERTIES).write_text(properties_of(candidate, reference, outcome.recipe.draft_model))
        state.save()
    except BaseException:
        for name in (*state.published, *reports):
            (out / name).unlink(missing_ok=True)
        raise
    shutil.rmtree(out / _WORK, ignore_errors=True)


def _reference(model: str, trial: CandidateTrial) -> str:
    """The name by which OUT refers to the model: a path does not depend on the current folder."""
    folder = trial.subject.folder
    is_path = Path(model).is_dir() and Path(model).resolve() == folder.resolve()
    return str(folder.resolve()) if is_path else model


def _show(outcome: SearchOutcome, args: argparse.Namespace) -> None:
    if args.json:
        sys.stdout.write(json.dumps(report_json(outcome), indent=2) + "\n")
        return
    console = wide_console()
    table = Table(*headings(outcome), box=None, pad_edge=False)
    for row in outcome.rows:
        table.add_row(*cells(row, outcome))
    console.print(FittingTable(table))
    for line in summary(outcome):
        console.print(line, soft_wrap=True, highlight=False)
    advice = f"serve it with: tandem up {quote(str(args.out))}; " if outcome.choice is not None else ""
    console.print(f"{advice}report: {args.out / 'report.md'}", soft_wrap=True, highlight=False)
