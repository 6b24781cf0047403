"""The command line, in this process: what each command shows, its exit code, and where its errors go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tiny

import fedkeep
from fedkeep.cli import main
from fedkeep.cli import run as cli_run
from fedkeep.cli.text import Terminal
from fedkeep.experiment.recipe_files import paper_tables, recipe_names


class Told:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "250")

    def call(*arguments: object) -> Told:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        return Told(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    fedkeep.run(fedkeep.load_recipe(tiny.write_recipe(folder), seeds=[0, 1], rounds=3), out=folder / "run")
    return folder / "run"


def test_an_output_that_lacks_a_character_gets_its_number(run: Path) -> None:
    command, env = [sys.executable, "-m", "fedkeep", "compare", str(run)], {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(command, capture_output=True, check=True, env=env)
    assert b"\\xb1" in shown.stdout


@pytest.mark.parametrize("errors", [None, subprocess.PIPE], ids=["nobody reads errors", "errors are read"])
def test_a_command_stops_when_its_reader_leaves(errors: int | None, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    recipe = tiny.write_recipe(tmp_path)
    for command in (["methods"], ["run", recipe, "--out", str(tmp_path / "run")]):
        program = [sys.executable, "-m", "fedkeep", *command]
        left = subprocess.run(program, stdout=write, stderr=write if errors is None else errors, check=False)
        assert left.returncode == 141
    os.close(write)


def test_training_stops_when_its_reader_leaves_and_says_how_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_run, "run_trials", lambda *_, **__: Terminal().on_broken_pipe())
    assert cli_run.run_with_progress([], Terminal(), "fedkeep resume RUN", quiet=True) == 141
    assert "Continue with: fedkeep resume RUN" in " ".join(capsys.readouterr().err.split())


def records(trial: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trial / "rounds.jsonl").read_text().splitlines()]


def test_run_shows_a_table_and_says_what_to_try_next(cli: Any, tmp_path: Path) -> None:
    recipe = tiny.write_recipe(tmp_path)
    shown = cli(
        "run",
        recipe,
        "--out",
        tmp_path / "run",
        "--workers",
        1,
        "--set",
        "sfedkd.tau=2",
        "--methods",
        "fedseq,SFedKD",
        "--seeds",
        "3,5",
        "--rounds",
        3,
        "--set",
        "run.evaluate_every=3",
    )
    assert (shown.code, shown.err) == (0, "")
    for expected in (
        "tiny",
        "FedSeq, SFedKD on digits, 8 clients (exdir), 2 a round, 3 rounds, seeds 3, 5",
        "accuracy",
        "forgetting",
        "round 3/3",
        "report.html",
        "what to try next",
        str(tmp_path / "run"),
    ):
        assert expected in shown.out, expected
    assert "FedAvg" not in shown.out
    trials = tmp_path / "run" / "trials"
    assert sorted(path.name for path in trials.iterdir()) == [
        "fedseq-seed3",
        "fedseq-seed5",
        "sfedkd-seed3",
        "sfedkd-seed5",
    ]
    assert ["correct" in record for record in records(trials / "sfedkd-seed3")] == [False, False, True]
    assert json.loads((trials / "sfedkd-seed3" / "trial.json").read_text())["options"]["tau"] == 2.0
    assert tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())["seeds"] == [3, 5]


def test_a_run_that_learns_nothing_says_so_and_what_to_change(cli: Any, tmp_path: Path) -> None:
    shown = cli("run", tiny.write_recipe(tmp_path), "--out", tmp_path / "run", "--workers", 1, "--rounds", 4,
               "--set", "training.lr=1e30")  # fmt: skip
    assert shown.code == 0
    assert "(at chance)" in shown.out, "in the progress"
    assert "local trainings not finite: lower training.lr" in shown.out
    assert "FedAvg\n  at chance" in "\n".join(line[:11].rstrip() for line in shown.out.splitlines()), "in the table"
    assert "warning: FedAvg (seed 0), FedSeq (seed 0), SFedKD (seed 0) did not learn" in shown.out
    assert "--set training.lr=1e+29 (it is 1e+30), or clip gradients, --set training.max_grad_norm=1." in shown.out
    assert "did not learn" in (tmp_path / "run" / "report.html").read_text()


def test_quiet_shows_no_progress(cli: Any, tmp_path: Path) -> None:
    shown = cli(
        "run", tiny.write_recipe(tmp_path), "--methods", "fedavg", "--out", tmp_path / "run", "--workers", 1, "--quiet"
    )
    assert shown.code == 0
    assert "round 2/2" not in shown.out
    assert "FedAvg" in shown.out


def test_resume_goes_on_and_shows_the_table(cli: Any, run: Path, tmp_path: Path) -> None:
    recipe = fedkeep.load_recipe(str(run / "recipe.toml"))

    def stop(step: Any) -> None:
        if (step.trial, step.done) == ("fedseq-seed1", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedkeep.run(recipe, out=tmp_path / "run", on_progress=stop)
    shown = cli("resume", tmp_path / "run", "--workers", 1)
    assert (shown.code, shown.err) == (0, "")
    assert "SFedKD" in shown.out
    assert "forgetting" in shown.out
    for trial in (run / "trials").iterdir():
        assert (tmp_path / "run" / "trials" / trial.name / "rounds.jsonl").read_bytes() == (
            trial / "rounds.jsonl"
        ).read_bytes()


def test_a_folder_that_begins_with_a_dash_is_no_option(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Path(tiny.write_recipe(tmp_path)).resolve()
    monkeypatch.chdir(tmp_path)
    shown = cli("run", recipe, "--methods", "fedavg", "--rounds", 1, "--out", "./-x")
    assert (shown.code, shown.err) == (0, "")
    assert f"fedkeep report {tmp_path / '-x'} --format latex" in shown.out
    assert f"fedkeep run {tmp_path / '-x' / 'recipe.toml'}" in shown.out


def test_an_interrupt_says_how_to_go_on(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedkeep.cli.run.run_trials", interrupt)
    shown = cli("run", tiny.write_recipe(tmp_path), "--out", tmp_path / "run")
    assert shown.code == 130
    assert f"fedkeep resume {tmp_path / 'run'}" in shown.out


def test_a_full_disk_names_the_path_and_how_to_go_on(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedkeep.experiment.trial_runner.run_trial", full)
    told = cli("run", tiny.write_recipe(tmp_path), "--out", tmp_path / "run", "--workers", 1)
    assert told.code == 1
    assert f"No space left on device: {tmp_path / 'run' / 'trials' / 'fedavg-seed0'}." in told.err
    assert f"Continue with: fedkeep resume {tmp_path / 'run'}" in " ".join(told.err.split())


def test_a_full_disk_names_what_could_not_be_written(
    cli: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)  # an error without a name, as that of a write
    told = cli("compare", run, "--format", "csv", "--out", tmp_path / "table.csv")
    assert told.code == 1
    wanted = f"error: No space left on device ({tmp_path / 'table.csv'}). Free space there, then repeat the command, "
    assert wanted in told.err
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_name_is_not_utf8_is_refused_before_training(cli: Any, tmp_path: Path) -> None:
    recipe, named = tiny.write_recipe(tmp_path), tmp_path / "l2\udce9"
    for command in (["run", recipe, "--out"], ["report"], ["compare"], ["verify"], ["export"]):
        told = cli(*command, named)
        assert told.code == 1, command
        assert "l2\\udce9' is not UTF-8. Choose another name, or rename what has it." in told.err, command
        assert not named.exists(), command


@pytest.mark.parametrize("target", ["gone", "link"])
def test_a_link_to_nothing_is_told(cli: Any, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tiny.write_recipe(tmp_path)
    for name in ("link", "runs"):
        Path(name).symlink_to(name if target == "link" else target)
    for link, out in (("link", ["--out", "link"]), ("link", ["--out", "link/below"]), ("runs", [])):
        told = cli("run", recipe, *out)
        assert told.code == 1
        assert f"error: {link} is a link to nothing. Remove it, create what it names, or choose" in told.err


def test_methods_lists_and_shows_one(cli: Any) -> None:
    shown = cli("methods")
    assert shown.code == 0
    for expected in ("fedavg", "parallel", "fedseq", "sequential", "sfedkd", "McMahan", "examples of each class"):
        assert expected in shown.out, expected
    shown = cli("methods", "SFedKD")
    assert shown.code == 0
    for expected in (
        "arXiv 2507.08508",
        "what leaves a client",
        "send_label_counts",
        "train: model, num_examples, num_steps, loss",
        "w_target",
        "3.0",
        "far | uniform",
        "softmax temperature",
        "at least 0.001",
    ):
        assert expected in shown.out, expected


def test_datasets(cli: Any, tmp_path: Path) -> None:
    shown = cli("datasets", "--data-dir", tmp_path)
    assert shown.code == 0
    for name in (
        "digits",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "cifar100",
        "cinic10",
        "femnist",
        "ham10000",
        "tiny-imagenet",
    ):
        assert name in shown.out, name


@pytest.mark.parametrize("columns", [80, 120, 250])
def test_recipes_are_listed_by_folder_and_table(columns: int, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = cli("recipes")
    assert shown.code == 0
    assert max(map(len, shown.out.splitlines())) <= columns
    words = shown.out.replace(",", " ").split()
    for name in recipe_names():
        assert name.rpartition("/")[2] in words, name
    for folder in ("fedkeep/", "sfedkd/", "fedcad/", "fedadkd/", "fedskf/", "feddcl/"):
        assert folder in words
    if columns == 250:
        (line,) = (line for line in shown.out.splitlines() if "ham10000-2-1" in line)
        assert line.split()[0] == "table1"
        assert "fashion-mnist-2-0.5, fashion-mnist-2-10, cifar10-2-0.5" in line, "in the paper's order"
        lines = [line for line in shown.out.splitlines() if line.strip()]
        tables = paper_tables()
        alone = [name for name in recipe_names() if name.rpartition("/")[0] not in tables]
        assert len(lines) == len(tables) + 6 + len(alone) + 2, "one each, the folders, and what else is shown"


def test_recipes_are_listed_before_pytorch_is_imported() -> None:
    code = "import sys\nfrom fedkeep.cli import main\nmain(['recipes'])\nassert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not shown.returncode, shown.stderr
    assert "sfedkd/" in shown.stdout


def test_recipes_shows_a_tables_columns(cli: Any) -> None:
    shown = cli("recipes", "fedcad/table1")
    assert shown.code == 0
    for expected in ("FedCAD, table 1", "EMNIST", "fedcad/table1/cifar100", "CIFAR-100, Dirichlet(0.5), 10 clients"):
        assert expected in shown.out, expected
    assert cli("recipes", "fedcad/table1/").out == shown.out


def test_recipes_prints_one_that_can_be_run(cli: Any, tmp_path: Path) -> None:
    shown = cli("recipes", "demo")
    printed = fedkeep.load_recipe(tiny.write_recipe(tmp_path, shown.out))
    assert printed.to_toml() == fedkeep.load_recipe("demo").to_toml()


def test_compare(cli: Any, run: Path) -> None:
    shown = cli("compare", run, "--against", "FedSeq")
    assert shown.code == 0
    assert "Difference to FedSeq, paired by seed" in shown.out
    assert "0, 1" in shown.out
    assert cli("compare", run, "--format", "markdown").out.startswith("|")
    csv = cli("compare", run, run, "--format", "csv").out.splitlines()
    assert len(csv) >= 4
    assert "," in csv[0]


def test_report_writes_again(cli: Any, run: Path, tmp_path: Path) -> None:
    for name in ("report.html", "table.md", "results.csv"):
        (run / name).unlink()
    shown = cli("report", run, "--figure", tmp_path / "curves.png")
    assert shown.code == 0
    assert "report.html" in shown.out
    assert all((run / name).stat().st_size > 100 for name in ("report.html", "table.md", "results.csv"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


ERRORS = [
    (["run", "demmo"], "no recipe 'demmo'. Did you mean 'demo'?"),
    (["run", "sfedkd/table2"], "one for each column of SFedKD, table 2: sfedkd/table2/cifar10-2-0.5"),
    (["run", "demo", "--methods", "fedsq"], "Did you mean 'fedseq'?"),
    (["run", "demo", "--set", "trainig.lr=1"], "Did you mean 'training'?"),
    (["run", "demo", "--set", "training.lr=-1"], "Training.lr must be at least 0.0"),
    (["run", "demo", "--set", "training.lr"], "write section.option=value"),
    (["run", "demo", "--device", "gpu"], "cannot use device 'gpu'"),
    (["run", "demo", "--set", "data.name=digts"], "Did you mean 'digits'?"),
    (["run", "demo", "--set", "partition.num_clients=1500"], "1500 clients"),
    (["run", "demo", "--use", "nowhere.py"], "no such file"),
    (["run", "demo", "--use", "no_such_module_here"], "no such module"),
    (["run", "demo", "--set", "model.name=os:system"], "--allow-code"),
    (["resume", "nowhere"], "no run folder"),
    (["report", "nowhere"], "nowhere"),
    (["compare", "nowhere"], "nowhere"),
    (["methods", "sfedk"], "Did you mean 'sfedkd'?"),
    (["recipes", "dem"], "Did you mean 'demo'?"),
]


@pytest.mark.parametrize(("arguments", "output"), ERRORS, ids=[" ".join(arguments) for arguments, _ in ERRORS])
def test_errors_go_to_stderr_with_code_1_before_anything_is_made(
    arguments: list[str], output: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = cli(*arguments)
    assert shown.code == 1
    assert shown.err.startswith("error: ")
    assert output in " ".join(shown.err.split())
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["run", "--rounds", "0"],
        ["run", "--rounds", "x"],
        ["run", "--seeds", "a"],
        ["run", "--seeds", ""],
        ["run", "--workers", "-1"],
        ["compare"],
        ["run", "--nonsense"],
    ],
)
def test_wrong_usage_is_code_2(arguments: list[str], cli: Any) -> None:
    shown = cli(*arguments)
    assert shown.code == 2
    assert "usage: fedkeep" in shown.err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["rnu"], "run"),
        (["report", "runs/x", "--format", "latx"], "latex"),
        (["run", "--mehtods", "fedavg"], "--methods"),
    ],
)
def test_a_mistyped_word_brings_the_nearest(arguments: list[str], meant: str, cli: Any) -> None:
    shown = cli(*arguments)
    assert shown.code == 2
    assert f"Did you mean '{meant}'?" in " ".join(shown.err.split())


def test_an_option_behind_two_dashes_does_not_bring_itself(cli: Any) -> None:
    shown = cli("resume", "--", "runs/x", "--quiet")
    assert "unrecognized arguments: --quiet" in shown.err
    assert "Did you mean" not in shown.err


def test_help_and_version(cli: Any) -> None:
    shown = cli("--help")
    assert shown.code == 0
    for command in ("run", "resume", "methods", "datasets", "compare", "report", "recipes"):
        assert command in shown.out
    assert cli("--version").out.split() == ["fedkeep", fedkeep.__version__]


def test_a_full_folder_is_refused(cli: Any, run: Path) -> None:
    shown = cli("run", "demo", "--out", run)
    assert shown.code == 1
    assert "fedkeep resume" in shown.err


def test_brackets_in_names_are_printed_as_they_are(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a [bold] [x]"
    folder.mkdir()
    text = tiny.RECIPE.replace('"tiny"', '"of [1] and [/b]"')
    shown = cli(
        "run",
        tiny.write_recipe(folder, text),
        "--methods",
        "fedavg",
        "--out",
        folder / "run",
        "--workers",
        1,
        "--quiet",
    )
    assert shown.code == 0
    assert "of [1] and [/b]" in shown.out
    assert f"run folder: {folder / 'run'}" in shown.out
    shown = cli("run", folder / "[missing].toml")
    assert shown.code == 1
    assert "[missing].toml" in shown.err


def test_python_in_five_lines(tmp_path: Path) -> None:
    run = fedkeep.run(
        tiny.write_recipe(tmp_path),
        methods=[fedkeep.FedSeq(), fedkeep.SFedKD(teachers=1)],
        rounds=2,
        out=tmp_path / "run",
    )
    assert [(trial.label, trial.finished, len(trial.accuracies)) for trial in run.trials] == [
        ("FedSeq", True, 2),
        ("SFedKD", True, 2),
    ]
    assert all(0 <= accuracy <= 1 for trial in run.trials for accuracy in trial.accuracies)
    again = fedkeep.read_run(tmp_path / "run")
    assert [list(trial.accuracies) for trial in again.trials] == [list(trial.accuracies) for trial in run.trials]


def test_compare_tells_the_rounds_to_a_target(cli: Any, run: Path) -> None:
    shown = cli("compare", run, "--target", 1)
    assert shown.code == 0
    assert "Rounds to 1 %" in shown.out
    assert "1, 1" in shown.out, "every model is better than that after its first round, with both seeds"
    assert "never" in cli("compare", run, "--target", 100).out
    assert cli("compare", run, "--target", 101).code == 2


def test_a_dry_run_says_what_a_run_would_take_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    recipe = tiny.write_recipe(tmp_path)
    before = set(tmp_path.iterdir())
    assert main(["run", str(recipe), "--methods", "fedavg,cwc", "--rounds", "4", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert set(tmp_path.iterdir()) == before
    fedavg, cwc = (
        next(line for line in shown.splitlines() if line.strip().startswith(name)) for name in ("FedAvg", "CWC")
    )
    assert "data as read:" in shown
    assert "GB" in fedavg
    assert "column" not in shown, "there is only one"
    assert cwc.split()[-1] == "MB" or float(cwc.split()[-2]) > float(fedavg.split()[-2]), "it sends importances too"


def test_a_dry_run_of_data_that_cannot_be_read_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "scores.csv"
    table.write_text("age,score\n" + "\n".join(f"{row},{row / 7:.3f}" for row in range(40)))
    words = ["run", "demo", "--set", f"data.name={table}", "--set", "data.label=score", "--dry-run"]
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "a number to be predicted" in " ".join(shown.err.split())
    assert "method" not in shown.out, "no table of unknown costs"
