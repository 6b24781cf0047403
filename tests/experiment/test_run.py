"""Runs as a user has them: folders, workers, kills, resumes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

import fedkeep
from fedkeep._utils import progress
from fedkeep._utils.digests import read_json, write_json
from fedkeep.cli import dry_run
from fedkeep.errors import ConfigError, FedKeepError, RunError
from fedkeep.experiment import build, plugins, runtime, trial_runner
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.run import open_run, prepare_run, resume_command
from fedkeep.experiment.runtime import Machine, recorded_machine
from fedkeep.experiment.trial_runner import run_trials
from fedkeep.trials.checkpoint import load_manifest, manifests
from fedkeep.trials.simulation import Simulation

ONE = Machine(workers=1)
SLOW_METHOD = """
import time
from dataclasses import dataclass

from fedkeep.algorithms.sequential.sfedkd import SFedKD


@dataclass(frozen=True)
class Slow(SFedKD):
    title = "slow"

    def round(self, server, cohort):
        time.sleep(0.03)
        super().round(server, cohort)
"""
HELD_METHOD = """
import time
from dataclasses import dataclass
from pathlib import Path

from fedkeep.algorithms.sequential.sfedkd import SFedKD


@dataclass(frozen=True)
class Held(SFedKD):
    title = "held"

    def round(self, server, cohort):
        if server.round == 9 and not Path(__file__).with_name("open").exists():
            time.sleep(600)
        super().round(server, cohort)
"""
CRASHING_METHOD = """
import os
from dataclasses import dataclass

from fedkeep.algorithms.sequential.fedseq import FedSeq


@dataclass(frozen=True)
class Crashing(FedSeq):
    title = "crashing"

    def round(self, server, cohort):
        if server.round == 2:
            raise ArithmeticError("the crash of the test")
        super().round(server, cohort)


@dataclass(frozen=True)
class Dying(FedSeq):
    title = "dying"

    def round(self, server, cohort):
        os._exit(9)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in this process."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = tiny.write_recipe(folder)
    fedkeep.run(load_recipe(recipe, seeds=[0, 1], rounds=3), out=folder / "run")
    return folder / "run"


def contents(run: Path, *names: str) -> dict[str, bytes]:
    names = names or ("rounds.jsonl", "model.safetensors", "partition.json", "trial.json", "result.json")
    return {
        f"{trial.name}/{name}": (trial / name).read_bytes()
        for trial in sorted((run / "trials").iterdir())
        for name in names
    }


def saved_round(trial: Path) -> int:
    return load_manifest(trial / "checkpoint" / manifests(trial / "checkpoint")[0]).round


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # What a shell starts in the background ignores Ctrl-C, and so would all that it starts.
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    return subprocess.Popen(
        [sys.executable, "-c", f"{listening}; import sys; from fedkeep.cli import main; sys.exit(main())", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def until(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            pytest.fail(f"it never came so far: {process.communicate(timeout=5)}")
        time.sleep(0.01)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_run_from_a_gpu_goes_on_without_one_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_json(tmp_path / "run.json", {"device": "cuda:1", "threads": 2, "stack": 4})
    assert recorded_machine(tmp_path, Machine()) == Machine(device="cpu", threads=2, stack=4)
    assert "begun on device 'cuda:1'" in caplog.text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert recorded_machine(tmp_path, Machine()).device == "cuda:1"


def test_a_run_folder_holds_everything_to_repeat_it(whole: Path) -> None:
    assert {path.name for path in whole.iterdir()} == {
        "run.json",
        "recipe.toml",
        "trials",
        "results.csv",
        "table.md",
        "report.html",
    }
    trials = [f"{method}-seed{seed}" for method in ("fedavg", "fedseq", "sfedkd") for seed in (0, 1)]
    assert sorted(path.name for path in (whole / "trials").iterdir()) == trials
    output = json.loads((whole / "run.json").read_text())
    assert {"fedkeep", "versions", "command", "started", "device", "threads", "title", "recipe", "git"} <= output.keys()
    assert output["machine"].split(", ")[-1] == torch.backends.cpu.get_cpu_capability()
    for trial in (whole / "trials").iterdir():
        files = {path.name for path in trial.iterdir()} - {".lock"}
        assert files == {
            "trial.json",
            "partition.json",
            "rounds.jsonl",
            "timings.jsonl",
            "result.json",
            "model.safetensors",
            "confusion.json",
            "manifest.json",
            "checkpoint",
        }
        records = [json.loads(line) for line in (trial / "rounds.jsonl").read_text().splitlines()]
        assert [record["round"] for record in records] == [1, 2, 3]
        assert all(len(record["correct"]) == 10 for record in records)
        timings = [json.loads(line) for line in (trial / "timings.jsonl").read_text().splitlines()]
        assert [timing["round"] for timing in timings] == [1, 2, 3]
        assert {"train", "teachers", "evaluate", "checkpoint", "round_seconds"} <= timings[0].keys()
        described = json.loads((trial / "trial.json").read_text())
        assert (described["num_clients"], described["cohort_size"], described["rounds"], described["num_classes"]) == (
            8,
            2,
            3,
            10,
        )
        assert sum(described["test_total"]) == 359
        partition = json.loads((trial / "partition.json").read_text())
        assert sum(map(sum, partition["counts"])) == 1438
        assert json.loads((trial / "result.json").read_text())["rounds"] == 3
        assert load_file(trial / "model.safetensors")["classifier.weight"].shape == (10, 8)


def test_the_methods_share_partition_and_cohorts_and_the_seeds_do_not(whole: Path) -> None:
    for seed in (0, 1):
        trials = [whole / "trials" / f"{method}-seed{seed}" for method in ("fedavg", "fedseq", "sfedkd")]
        assert len({(trial / "partition.json").read_bytes() for trial in trials}) == 1
        cohorts = [
            [json.loads(line)["cohort"] for line in (trial / "rounds.jsonl").read_text().splitlines()]
            for trial in trials
        ]
        assert cohorts[0] == cohorts[1] == cohorts[2]
    files = contents(whole, "partition.json", "rounds.jsonl")
    assert files["fedavg-seed0/partition.json"] != files["fedavg-seed1/partition.json"]
    assert files["fedavg-seed0/rounds.jsonl"] != files["fedavg-seed1/rounds.jsonl"]


def test_a_command_that_repeats_a_run_has_what_decides_its_bits() -> None:
    machine = Machine(threads=2, stack=3, workers=0)
    assert resume_command(Path("r/recipe.toml"), machine, "run") == "fedkeep run r/recipe.toml --threads 2 --stack 3"
    assert resume_command(Path("my run"), machine) == "fedkeep resume 'my run'"


def test_a_run_repeats_from_its_own_recipe(whole: Path, tmp_path: Path) -> None:
    fedkeep.run(str(whole / "recipe.toml"), out=tmp_path / "again")
    assert contents(tmp_path / "again") == contents(whole)


def test_progress_is_told_after_every_round(tmp_path: Path) -> None:
    output: list[Any] = []
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg"], settings=["run.evaluate_every=2"], rounds=3)
    fedkeep.run(recipe, out=tmp_path / "run", on_progress=output.append)
    assert [(step.trial, step.done, step.rounds) for step in output] == [("fedavg-seed0", n, 3) for n in (1, 2, 3)]
    assert [step.record and step.record["round"] for step in output] == [None, 2, 3]


def test_within_a_long_round_it_is_told_how_many_clients_are_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output: list[Any] = []
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.0)
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg"], rounds=2)
    experiment = Experiment(recipe)
    folder = prepare_run(experiment, tmp_path / "run", ["test"])
    run_trials(experiment.trials(folder), retry="", on_progress=output.append)
    many = recipe.run.cohort_size
    words = [*(f"train {n}/{many}" for n in range(many)), ""]
    told = [step for step in output if ", step " not in step.activity]
    assert [(step.done, step.activity) for step in told] == [
        (round + (not word), word) for round in (0, 1) for word in words
    ]
    first = [step for step in output if step.activity.startswith("train 0/") and not step.done]
    steps = int(first[-1].activity.rpartition("/")[2])
    assert [step.activity for step in first[1:]] == [f"train 0/{many}, step {n}/{steps}" for n in range(1, steps + 1)]
    shares = [step.share for step in output if step.activity and not step.done]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    output.clear()
    fedkeep.run(recipe, out=tmp_path / "again", on_progress=output.append)
    assert [(step.done, step.activity) for step in output] == [(1, ""), (2, "")]


@pytest.mark.parametrize("kind", ["file", "full folder", "run folder"])
def test_a_folder_that_is_taken_is_refused(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "thesis.txt").write_text("mine")
        if kind == "run folder":
            (out / "run.json").write_text("{}")
    message = {"file": "is a file", "full folder": "not empty.*--out", "run folder": "not empty.*--out.*fedkeep resume"}
    with pytest.raises(RunError, match=message[kind]):
        prepare_run(Experiment(load_recipe(tiny.write_recipe(tmp_path))), out)
    assert (out if kind == "file" else out / "thesis.txt").read_text() == "mine"


def test_an_empty_folder_is_fine_and_names_are_made_up_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    experiment = Experiment(load_recipe(tiny.write_recipe(tmp_path)))
    assert prepare_run(experiment, tmp_path / "run") == tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    folders = [prepare_run(experiment, None) for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(folder.parent == Path("runs") and folder.name.startswith("recipe-") for folder in folders)


def test_what_cannot_be_carried_out_shows_before_a_folder_is_made(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path)
    for settings, machine in (
        (["partition.num_clients=2000"], ONE),
        (["data.name=digts"], ONE),
        ([], Machine(device="gpu")),
        (["partition.scheme=column", "partition.num_clients=0", "run.cohort_size=50"], ONE),
        (["model.name=resnet18", "training.batch_size=1"], ONE),
        (["augmentation.crop_padding=8"], ONE),
    ):
        with pytest.raises(FedKeepError):
            prepare_run(Experiment(load_recipe(path, settings=settings), machine), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_cohort_larger_than_the_natural_clients_shows_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path))
    monkeypatch.setattr(build, "build_federation", lambda *args: tiny.federation((5,)))
    with pytest.raises(ConfigError, match="a cohort of 2 cannot be drawn from 1"):
        prepare_run(Experiment(recipe), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(dry_run, "build_federation", lambda *args: tiny.federation((5,)))
    with pytest.raises(ConfigError, match="a cohort of 2 cannot be drawn from 1"):
        dry_run.estimate(recipe, recipe.methods[0], Machine())


def test_a_model_of_ones_own_runs_from_python(tmp_path: Path) -> None:
    """The user gave the function himself: there is nothing to allow."""
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg"], rounds=1)
    recipe = replace(recipe, model=fedkeep.custom(own_network))
    run = fedkeep.run(recipe, out=tmp_path / "run")
    assert run.trials[0].finished


def own_network(shape: tuple[int, int, int], classes: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


def test_resuming_a_finished_run_does_nothing(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in (whole / "trials").rglob("*") if path.is_file()}
    monkeypatch.setattr(Simulation, "run_round", lambda self: pytest.fail("a round was played"))
    fedkeep.resume(whole)
    assert {path: path.stat().st_mtime_ns for path in (whole / "trials").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("files", [[], ["recipe.toml"], ["run.json"]])
def test_what_is_no_run_folder_is_refused(files: list[str], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(RunError, match="no run folder"):
        open_run(tmp_path, ONE)


def test_one_interrupted_trial_resumes_and_finished_ones_stay(whole: Path, tmp_path: Path) -> None:
    def on_progress(step: Any) -> None:
        if (step.trial, step.done) == ("sfedkd-seed0", 2):
            raise KeyboardInterrupt

    recipe = load_recipe(str(whole / "recipe.toml"))
    with pytest.raises(KeyboardInterrupt):
        fedkeep.run(recipe, out=tmp_path / "run", on_progress=on_progress)
    done = sorted(path.parent.name for path in (tmp_path / "run").rglob("result.json"))
    assert done == ["fedavg-seed0", "fedseq-seed0"]
    fedkeep.resume(tmp_path / "run")
    assert contents(tmp_path / "run") == contents(whole)


def test_a_trial_tells_which_versions_ran_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(step: Any) -> None:
        if step.done == 2:
            raise KeyboardInterrupt

    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg"])
    with pytest.raises(KeyboardInterrupt):
        fedkeep.run(recipe, out=tmp_path / "run", on_progress=stop)
    here = runtime.describe_version()
    assert here.startswith("FedKeep ")
    assert f"PyTorch {torch.__version__}" in here
    monkeypatch.setattr(trial_runner, "describe_version", lambda: "FedKeep 9")
    (trial,) = fedkeep.resume(tmp_path / "run").trials
    assert trial.versions == (here, "FedKeep 9")
    assert (
        "Trials that another version continued, which report.html names: 1 of 1."
        in (tmp_path / "run" / "table.md").read_text()
    )
    output = read_json(trial.path / "trial.json")
    write_json(trial.path / "trial.json", {key: output[key] for key in output if key != "versions"})
    trial_runner.write_description(trial.path, output)
    assert json.loads((trial.path / "trial.json").read_text())["versions"] == ["an unknown version", "FedKeep 9"]
    assert f"fedavg-seed0 was run by {here}; then FedKeep 9" in (tmp_path / "run" / "report.html").read_text()


def test_a_damaged_checkpoint_is_a_clear_error(whole: Path, tmp_path: Path) -> None:
    test_one_interrupted_trial_resumes_and_finished_ones_stay(whole, tmp_path)
    trial = tmp_path / "run" / "trials" / "sfedkd-seed0"
    (trial / "result.json").unlink()
    for model in (trial / "checkpoint").glob("server-*.safetensors"):
        model.write_bytes(model.read_bytes()[:100])
    with pytest.raises(RunError, match=r"no checkpoint .* is whole.*server-3.*is damaged.*remove the folder"):
        fedkeep.resume(tmp_path / "run")

    shutil.rmtree(trial)  # as the error says
    fedkeep.resume(tmp_path / "run")
    assert contents(tmp_path / "run") == contents(whole)


def test_a_resume_uses_the_threads_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results depend on the number of threads, and a resume promises the identical ones."""
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg"])
    folder = prepare_run(Experiment(recipe, Machine(threads=2)), tmp_path / "run")
    used: list[int] = []
    monkeypatch.setattr(
        trial_runner, "plain_torch", lambda threads: used.append(threads) or pytest.MonkeyPatch.context()
    )
    fedkeep.resume(folder)
    assert used == [2]


def test_threads_are_given_back() -> None:
    import torch

    before = torch.get_num_threads()
    with trial_runner.plain_torch(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


# Other processes


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe whose ninth round waits until there is a file ``open``, and its ``whole`` run."""
    folder = tmp_path_factory.mktemp("held")
    (folder / "held_method.py").write_text(HELD_METHOD)
    text = tiny.RECIPE.split("[[methods]]")[0] + '[[methods]]\nalgorithm = "held"\nteachers = 2\n'
    recipe = tiny.write_recipe(folder, text)
    plugins.import_user_code([str(folder / "held_method.py")])
    (folder / "open").touch()
    fedkeep.run(load_recipe(recipe, rounds=12), out=folder / "whole")
    return folder


def test_two_workers_with_a_method_of_a_file_give_the_same_bytes(held: Path, tmp_path: Path) -> None:
    (held / "open").touch()
    output: list[Any] = []
    recipe = load_recipe(str(held / "recipe.toml"), rounds=12, seeds=[0, 1])
    machine = Machine(workers=2, use=(str(held / "held_method.py"),))
    fedkeep.run(recipe, out=tmp_path / "run", machine=machine, on_progress=output.append)
    assert contents(held / "whole").items() <= contents(tmp_path / "run").items()
    rounds: dict[str, list[int]] = {}
    for step in output:
        assert step.rounds == 12
        assert "correct" in step.record
        rounds.setdefault(step.trial, []).append(step.done)
    assert rounds == {f"held-seed{seed}": list(range(1, 13)) for seed in (0, 1)}


@pytest.mark.parametrize(
    "how",
    # What a kill leaves is tried inside this process with every method: tests/algorithms/test_conformance.py.
    [
        signal.SIGTERM,
        *(pytest.param(how, marks=pytest.mark.slow) for how in (signal.SIGINT, signal.SIGHUP, signal.SIGKILL)),
    ],
    ids=lambda how: how.name,
)
def test_killed_in_the_middle_it_resumes_to_the_same_bytes(how: signal.Signals, held: Path, tmp_path: Path) -> None:
    (held / "open").unlink(missing_ok=True)
    use = ["--use", str(held / "held_method.py"), "--workers", "1", "--quiet"]
    process = start(["run", str(held / "recipe.toml"), "--rounds", "12", *use, "--out", str(tmp_path / "cut")])
    trial = tmp_path / "cut" / "trials" / "held-seed0"
    try:
        until(lambda: lines(trial / "rounds.jsonl") == 8, process)
        process.send_signal(how)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    if how is not signal.SIGKILL:
        assert process.returncode == 128 + how
        assert "fedkeep resume" in out
        assert "Traceback" not in errors
        saved = saved_round(trial)
        assert saved == lines(trial / "rounds.jsonl"), "every finished round is saved"
    assert lines(trial / "rounds.jsonl") == 8
    assert not (trial / "result.json").exists()
    (held / "open").touch()
    fedkeep.resume(tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(held / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("group", [True, False], ids=["to all processes", "to the first process only"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda how: how.name)
def test_workers_stop_on_a_signal(how: signal.Signals, group: bool, tmp_path: Path) -> None:
    (tmp_path / "slow_method.py").write_text(SLOW_METHOD)
    text = tiny.RECIPE.split("[[methods]]")[0] + '[[methods]]\nalgorithm = "slow"\n'
    recipe = tiny.write_recipe(tmp_path, text)
    use = ["--use", str(tmp_path / "slow_method.py"), "--workers", "2", "--quiet"]
    process = start(["run", recipe, "--seeds", "0,1,2", "--rounds", "6000", "--out", str(tmp_path / "run"), *use])
    trials = tmp_path / "run" / "trials"
    try:
        until(lambda: all(lines(trials / f"slow-seed{seed}" / "rounds.jsonl") >= 2 for seed in (0, 1)), process)
        os.killpg(process.pid, how) if group else process.send_signal(how)
        out, _errors = process.communicate(timeout=90)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 128 + how
    assert "fedkeep resume" in out
    assert not (trials / "slow-seed2").exists()
    for seed in (0, 1):
        saved = saved_round(trials / f"slow-seed{seed}")
        assert saved == lines(trials / f"slow-seed{seed}" / "rounds.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "message"), [("crashing", "the crash of the test"), ("dying", "a worker process died")]
)
def test_a_crash_in_a_worker_is_reported_and_does_not_hang(method: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "crashing_method.py").write_text(CRASHING_METHOD)
    (tmp_path / "slow_method.py").write_text(SLOW_METHOD)
    text = (
        tiny.RECIPE.split("[[methods]]")[0] + f'[[methods]]\nalgorithm = "slow"\n[[methods]]\nalgorithm = "{method}"\n'
    )
    use = [
        "--use",
        str(tmp_path / "crashing_method.py"),
        "--use",
        str(tmp_path / "slow_method.py"),
        "--workers",
        "2",
        "--quiet",
    ]
    process = start(
        ["run", tiny.write_recipe(tmp_path, text), "--rounds", "6000", "--out", str(tmp_path / "run"), *use]
    )
    try:
        _, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("the other worker was waited for: it would have taken minutes")
    assert process.returncode == 1
    assert message in errors
    if method == "crashing":
        assert "crashing_method.py" in errors, "the worker's traceback"
        assert "ArithmeticError" in errors


@pytest.mark.parametrize("asked", [0, 3])
def test_a_resume_repeats_the_stacks_of_the_run(asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks change rounding, so what a user or a trial chose stays with the trial."""
    recipe = load_recipe(
        tiny.write_recipe(tmp_path), methods=["fedavg"], settings=["run.cohort_size=6", "run.rounds=4"]
    )
    monkeypatch.setattr(trial_runner, "choose_stack_size", lambda state, workers: 3)
    machine = Machine(workers=1, stack=asked)
    whole = fedkeep.run(recipe, out=tmp_path / "whole", machine=machine)
    folder, seen = tmp_path / "cut", []

    def stop(progress: Any) -> None:
        seen.append(progress)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedkeep.run(recipe, out=folder, machine=machine, on_progress=stop)
    monkeypatch.setattr(trial_runner, "choose_stack_size", lambda state, workers: pytest.fail("chosen twice"))
    fedkeep.resume(folder)
    trial = Path("trials") / "fedavg-seed0"
    assert json.loads((folder / trial / "trial.json").read_text())["stack"] == 3
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (folder / trial / name).read_bytes() == (tmp_path / "whole" / trial / name).read_bytes()
    assert whole.trials[0].rounds_planned == 4


def test_a_sequence_has_no_stacks_whatever_is_asked(tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg", "fedseq"], settings=["run.rounds=1"])
    fedkeep.run(recipe, out=tmp_path / "run", machine=Machine(stack=2))
    cells_of = {name: tmp_path / "run" / "trials" / f"{name}-seed0" / "trial.json" for name in ("fedavg", "fedseq")}
    assert {n: json.loads(path.read_text())["stack"] for n, path in cells_of.items()} == {"fedavg": 2, "fedseq": 1}


def test_a_damaged_description_of_a_trial_is_named(tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg"], settings=["run.rounds=3"])

    def stop(progress: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedkeep.run(recipe, out=tmp_path / "run", on_progress=stop)
    described = tmp_path / "run" / "trials" / "fedavg-seed0" / "trial.json"
    described.write_text(described.read_text()[:20])
    with pytest.raises(RunError, match=r"trial\.json is damaged.*remove the folder"):
        fedkeep.resume(tmp_path / "run")
