"""An archive of a run reads as its folder does, keeps what it must, and cannot do harm."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import RECIPE, read_run, write_demo, write_json, write_run, write_trial

from fedkeep._utils.digests import read_json
from fedkeep.cli.main import main
from fedkeep.errors import RunError
from fedkeep.reporting import run_folder
from fedkeep.reporting.run_folder import runs_in, write_archive
from fedkeep.reporting.summary import summary
from fedkeep.reporting.table import markdown, trials_csv

LARGEST = 1 << 20


def hostile(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return path


def test_an_archive_reads_as_its_folder(tmp_path: Path) -> None:
    folder = write_demo(tmp_path / "demo", rounds=6)
    packed = write_archive({"": folder}, tmp_path / "kept" / "demo.zip")
    one, other = read_run(folder), read_run(packed)
    info = read_json(folder / "run.json")
    write_json(folder / "run.json", info | {"recipe": "/home/me/tables/mine/a.toml"})
    elsewhere = read_run(write_archive({"": folder}, tmp_path / "kept" / "named.zip")).info["recipe"]
    assert elsewhere == "mine/a.toml"
    assert one.info["command"][0] == "/home/me/.venv/bin/fedkeep"
    assert other.info == one.info | {"command": ["fedkeep", *one.info["command"][1:]]}, "no path of somebody's machine"
    assert (other.recipe, other.labels) == (one.recipe, one.labels)
    assert [trial.rounds for trial in other.trials] == [trial.rounds for trial in one.trials]
    assert [trial.finished for trial in other.trials] == [trial.finished for trial in one.trials]
    assert trials_csv(summary(other)) == trials_csv(summary(one))
    assert markdown(summary(other)) == markdown(summary(one))


def test_the_same_records_give_the_same_bytes_without_models_and_checkpoints(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    trial = write_trial(run, "FedAvg", 0, [[5, 5]])
    before = write_archive({"": run}, tmp_path / "a.zip").read_bytes()
    for name in ("model.safetensors", ".lock", "checkpoint/manifest.json", "journal/1.json"):
        (trial / name).parent.mkdir(exist_ok=True)
        (trial / name).write_text("{}")
    (run / "report.html").write_text("<html>")
    assert write_archive({"": run}, tmp_path / "b.zip").read_bytes() == before
    with zipfile.ZipFile(tmp_path / "b.zip") as file:
        names = [name.removeprefix("trials/fedavg-seed0/") for name in file.namelist()]
    assert names == [
        "recipe.toml", "run.json", "manifest.json", "partition.json", "result.json", "rounds.jsonl", "timings.jsonl",
        "trial.json",
    ]  # fmt: skip


def test_an_archive_is_never_replaced_by_one_that_holds_less(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [[5, 5]])
    target = write_archive({"": run}, tmp_path / "run.zip")
    write_trial(run, "FedAvg", 1, [[6, 6]])
    write_archive({"": run}, target)
    assert len(read_run(target).trials) == 2
    less = write_run(tmp_path / "less")
    write_trial(less, "FedAvg", 0, [[5, 5]])
    with pytest.raises(RunError, match=r"holds trials/fedavg-seed1/manifest\.json and 5 more files"):
        write_archive({"": less}, target)
    assert len(read_run(target).trials) == 2


@pytest.mark.parametrize("name", ["../run.json", "/etc/passwd", "trials/../../x", "..\\run.json", "C:\\x", "C:x"])
def test_names_that_lead_out_of_an_archive_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="leads out of the archive or is no name"):
        read_run(hostile(tmp_path / "bad.zip", {"run.json": b"{}", name: b"x"}))


def test_an_archive_that_says_it_holds_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "MAX_BYTES", LARGEST)
    with pytest.raises(RunError, match=r"2 files of 1,048,577 bytes in all"):
        read_run(hostile(tmp_path / "bomb.zip", {"run.json": b"{}", "recipe.toml": b" " * (LARGEST - 1)}))
    monkeypatch.setattr(run_folder, "MAX_FILES", 3)
    with pytest.raises(RunError, match="4 files"):
        read_run(hostile(tmp_path / "many.zip", {"run.json": b"{}", "a": b"", "b": b"", "c": b""}))
    monkeypatch.setattr(run_folder, "MAX_BYTES", 10)
    with pytest.raises(RunError, match="larger than 10 bytes"):
        read_run(tmp_path / "many.zip")


def test_a_file_that_unpacks_to_more_than_it_says_is_cut_and_refused(tmp_path: Path) -> None:
    """The archive's directory says a hundred bytes; what is packed are a hundred megabytes."""
    path = hostile(tmp_path / "liar.zip", {"run.json": b" " * 100_000_000})
    raw = bytearray(path.read_bytes())
    location = raw.index(b"PK\1\2")
    raw[location + 24 : location + 28] = struct.pack("<I", 100)
    path.write_bytes(raw)
    with pytest.raises(RunError, match=r"run\.json cannot be read"):
        read_run(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_other_compressions_are_refused(tmp_path: Path, method: int) -> None:
    with pytest.raises(RunError, match="another way than deflate"):
        read_run(hostile(tmp_path / "other.zip", {"run.json": b"{}"}, method))


def test_encrypted_files_are_refused(tmp_path: Path) -> None:
    path = hostile(tmp_path / "secret.zip", {"run.json": b"{}"})
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(raw)
    with pytest.raises(RunError, match="encrypted"):
        read_run(path)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as file:
        file.writestr("run.json", "{}")
        with pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("run.json", "{}")
    with pytest.raises(RunError, match="two files of one name"):
        read_run(tmp_path / "two.zip")


def test_what_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not packed")
    with pytest.raises(RunError, match="neither a run folder nor an archive"):
        read_run(tmp_path / "notes.txt")
    with pytest.raises(RunError, match=r"is not a run: it has no run\.json"):
        read_run(hostile(tmp_path / "empty.zip", {"readme": b""}))


def test_the_commands_read_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_demo(tmp_path / "runs" / "demo", rounds=6)
    assert main(["archive", "runs/demo"]) == 0
    assert "wrote results/demo.zip" in capsys.readouterr().out
    assert main(["compare", "runs/demo", "--format", "csv"]) == 0
    folder = capsys.readouterr().out
    assert main(["compare", "results/demo.zip", "--format", "csv"]) == 0
    assert capsys.readouterr().out == folder
    assert main(["report", "results/demo.zip"]) == 0
    assert "runs/report-demo/report.html" in capsys.readouterr().out
    assert "SFedKD" in (tmp_path / "runs" / "report-demo" / "report.html").read_text()
    assert main(["report", "results/demo.zip", "--out", "elsewhere"]) == 0
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == [
        "report.html",
        "results.csv",
        "table.md",
    ]
    assert main(["archive", "results"]) == 1


def test_several_runs_share_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path leads into it; a run that is archived again is replaced, the others stay."""
    monkeypatch.chdir(tmp_path)
    for name in ("tau-0.5", "tau-1"):
        write_trial(write_run(tmp_path / "runs" / name, title=f"Choice of {name}"), "FedAvg", 0, [[5, 5]])
        assert main(["archive", f"runs/{name}", "--out", "results/choices.zip"]) == 0
    assert read_run("results/choices.zip/tau-0.5").title == "Choice of tau-0.5"
    write_trial(tmp_path / "runs" / "tau-1", "FedAvg", 1, [[6, 6]])
    assert main(["archive", "runs/tau-1", "--out", "results/choices.zip"]) == 0
    assert [len(read_run(path).trials) for path in runs_in(Path("results"))] == [1, 2]
    assert main(["compare", "results/choices.zip/tau-0.5", "results/choices.zip/tau-1", "--format", "csv"]) == 0
    capsys.readouterr()
    assert main(["report", "results/choices.zip/tau-0.5"]) == 0
    assert "runs/report-tau-0.5/report.html" in capsys.readouterr().out
    for path in ("results/choices.zip", "results/choices.zip/tau"):
        assert main(["report", path]) == 1
        assert "results/choices.zip/tau-0.5, results/choices.zip/tau-1" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "runs" / "tau-1" / "trials" / "fedavg-seed1" / "rounds.jsonl").unlink()
    before = Path("results/choices.zip").read_bytes()
    assert main(["archive", "runs/tau-1", "--out", "results/choices.zip"]) == 1, "a file would be lost"
    assert main(["archive", "runs/tau-0.5"]) == 0
    write_trial(tmp_path / "runs" / "tau-1", "FedAvg", 1, [[6, 6]])
    assert main(["archive", "runs/tau-1", "--out", "results/tau-0.5.zip"]) == 1
    assert "is the archive of one run" in " ".join(capsys.readouterr().err.split())
    assert Path("results/choices.zip").read_bytes() == before


def test_a_reproduction_is_kept_in_one_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its page is the same from the archive as from folders, with what a person wrote about it."""
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "runs" / "toy"
    paper = '\n[paper]\ntable = "Toy, table 1"\ncolumns = ["second", "first"]\naccuracy = { FedAvg = [50.0] }\n'
    for name in ("first", "second"):
        run = write_run(source / name, recipe=RECIPE + paper, title=f"Toy: {name}")
        write_trial(run, "FedAvg", 0, [[5, 5]])
    write_json(source / "reproduction.json", {"table": "papers/toy"})
    assert main(["archive", "runs/toy", "--out", "kept"]) == 0
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["toy.zip"]
    notes = "# Notes\n\n## toy\n\nA person says [this](../docs/why.md#so), and [that](https://example.org).\n"
    for out, page in (("runs", "docs/one.md"), ("kept", "docs/two.md")):
        (tmp_path / out / "notes.md").write_text(notes)
        assert main(["reproduce", "--out", out, "--page", page]) == 0
    one, two = ((tmp_path / "docs" / page).read_text().rpartition("*Written by ")[0] for page in ("one.md", "two.md"))
    assert one == two
    assert one.index("Toy: second") < one.index("Toy: first"), "in the paper's order"
    assert "A person says [this](why.md#so), and [that](https://example.org)." in one
    (tmp_path / "kept" / "notes.md").write_text(notes.replace("## toy", "## toi"))
    capsys.readouterr()
    assert main(["reproduce", "--out", "kept", "--page", "two.md"]) == 1
    assert "a section 'toi', but kept holds no such reproduction. Did you mean 'toy'?" in " ".join(
        capsys.readouterr().err.split()
    )
    write_run(tmp_path / "kept" / "toy" / "first")
    assert main(["archive", str(source / "first"), "--out", "kept/toy.zip"]) == 1, "it would be a column of the table"
    assert "is the archive of a reproduction" in " ".join(capsys.readouterr().err.split())
    write_json(tmp_path / "kept" / "toy" / "reproduction.json", {"table": "papers/toy"})
    assert main(["reproduce", "--out", "kept", "--page", "two.md"]) == 1
    assert "'toy' as a folder and as an archive" in " ".join(capsys.readouterr().err.split())


def test_an_archive_is_shown_by_name_where_something_is_missing(tmp_path: Path) -> None:
    write_archive({"": write_run(tmp_path / "run")}, tmp_path / "kept.zip")
    with pytest.raises(RunError, match=r"Runs nearby: .*kept\.zip"):
        read_run(tmp_path / "kep.zip")
    Console(file=io.StringIO()).print(read_run(tmp_path / "kept.zip").title)


def test_no_folder_of_the_command_is_handed_on(tmp_path: Path) -> None:
    command = [
        "/home/me/fedkeep",
        "run",
        "--out=/home/me/a/run",
        "--set",
        "data=/home/me/b.csv",
        "training.lr=0.1",
        "x/y",
    ]
    packed = write_archive({"": write_run(tmp_path / "run", command=command)}, tmp_path / "a.zip")
    with zipfile.ZipFile(packed) as file:
        found = json.loads(file.read("run.json"))["command"]
    assert found == ["fedkeep", "run", "--out=run", "--set", "data=b.csv", "training.lr=0.1", "x/y"]


@pytest.mark.parametrize(("offset", "value"), [(6, 99), (8, 0x20), (8, 0x40)])
def test_archives_of_another_version_or_with_patches_are_refused(tmp_path: Path, offset: int, value: int) -> None:
    content = bytearray(hostile(tmp_path / "a.zip", {"run.json": b"{}"}).read_bytes())
    content[content.index(b"PK\x01\x02") + offset] = value
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(RunError, match=r"a\.zip"):
        read_run(tmp_path / "a.zip")


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    run = write_demo(tmp_path / "demo lr:0.1", rounds=2)
    with pytest.raises(RunError, match="is no name on every system"):
        write_archive({run.name: run}, tmp_path / "several.zip")
    assert not (tmp_path / "several.zip").exists()


def test_another_run_of_the_same_name_is_not_replaced(tmp_path: Path) -> None:
    one, other = (write_demo(tmp_path / name / "demo", rounds=2) for name in ("one", "other"))
    info = json.loads((other / "run.json").read_text())
    target = write_archive({"demo": one}, tmp_path / "several.zip")
    before = target.read_bytes()
    assert write_archive({"demo": one}, target).read_bytes() == before
    write_json(other / "run.json", info | {"started": "2027-01-01T00:00:00+00:00"})
    with pytest.raises(RunError, match="holds another run named demo, which was started at"):
        write_archive({"demo": other}, target)
    assert target.read_bytes() == before
