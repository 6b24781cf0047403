"""What a new user does, as transcripts: the commands and the lines of Python that the pages show.

1. Own photos of mixed sizes become a report.
2. Own tensors, module and clients, in under 12 lines of Python.
3. A table in LaTeX and a figure in PDF, in one command each.
4. A grid of nine with held-out examples, in one command.
5. The trained model, in plain PyTorch and in ONNX Runtime, with equal predictions.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from pages import blocks, command_lines, inline
from photos import take_photos

from fedkeep.cli import main
from fedkeep.reporting.run_folder import read_run

QUICK = ["--workers", "1", "--quiet"]


def shown_line(page: str, *parts: str) -> list[str]:
    """The words of the one command of a page with these parts."""
    (line,) = (line for line in command_lines(page) if all(part in line for part in parts))
    return shlex.split(line, comments=True)[1:]


def digests(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*.png"))}


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("PIL")
    monkeypatch.chdir(tmp_path)
    return take_photos(tmp_path / "photos")


def test_photos_of_mixed_sizes_become_a_report(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = digests(photos)
    assert main([*shown_line("docs/get-started.md", "data.name=photos"), "--methods", "fedseq", *QUICK]) == 0
    assert "report.html" in capsys.readouterr().out
    page = Path("runs/photos/report.html").read_text()
    assert {"cat", "dog"} <= set(re.findall(r"\b(?:cat|dog)\b", page)), "classes have the names of their folders"
    assert all(trial.finished for trial in read_run(Path("runs/photos")).trials)
    assert digests(photos) == before, "the user's files stay as they are"


def test_own_tensors_module_and_clients_in_under_twelve_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = (code for code in blocks("README.md", "python") if "load_digits" in code)
    assert len([line for line in code.splitlines() if line]) < 12
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})  # noqa: S102 - the repository's own text
    printed = capsys.readouterr().out
    assert "FedSeq, moving average minus FedAvg: +13.15 [+6.96, +19.34]" in printed, "what the page says beside it"
    assert float(printed.rsplit("'0': ", 1)[1].split(",")[0]) > 0.9, "it has learned"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stories")
    out = folder / "run"
    arguments = ["run", tiny.write_recipe(folder), "--methods", "fedavg,fedseq", "--seeds", "0,1", "--out", str(out)]
    assert main([*arguments, *QUICK]) == 0
    return out


def test_a_table_in_latex_and_a_figure_in_pdf_in_one_command_each(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["report", str(run), "--format", "latex"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"\\begin\{tabular\}\{l[rl]+\}.*\\toprule.*FedAvg &.*\\bottomrule", table, flags=re.S), table
    (shown,) = (code for code in inline("README.md") if "--figure" in code)
    assert main(shlex.split(shown.replace("runs/RUN", str(run)))[1:]) == 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(run), "--figure", "accuracy.pdf"]) == 0
    figure = (tmp_path / "accuracy.pdf").read_bytes()
    assert figure.startswith(b"%PDF")
    assert float(re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", figure)[1]) == pytest.approx(3.3 * 72, abs=0.5)  # type: ignore[index]


def test_a_grid_of_nine_with_held_out_examples_in_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tiny.write_recipe(tmp_path)
    grid = ["--grid", "sfedkd.tau=1,2,4", "--grid", "sfedkd.teachers=1,3,5", "--seeds", "100", "--validation", "0.1"]
    assert main(["tune", recipe, *grid, "--rounds", "1", "--out", "tuned", *QUICK]) == 0
    rows = list(csv.DictReader(Path("tuned/run/results.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == [
        f"SFedKD (tau {tau}, teachers {k})" for tau in (1, 2, 4) for k in (1, 3, 5)
    ]
    assert Path("tuned/best.toml").is_file()
    assert "best.toml" in capsys.readouterr().out


IN_PLAIN_PYTORCH_AND_ONNX = """
import json, sys
sys.modules["fedkeep"] = None
import numpy, onnxruntime, torch
from PIL import Image
pixels = [numpy.asarray(Image.open(path)).transpose(2, 0, 1) for path in sys.argv[1:]]
images = numpy.stack([image[:, :32, :32] for image in pixels])
model = torch.export.load("model.pt2").module()
session = onnxruntime.InferenceSession("model.onnx")
plain = model(torch.from_numpy(images)).detach().numpy()
onnx = session.run(None, {"inputs": images})[0]
numpy.testing.assert_allclose(plain, onnx, rtol=0, atol=1e-5)
print(json.dumps([plain.argmax(-1).tolist(), onnx.argmax(-1).tolist()]))
"""


@pytest.mark.slow
def test_the_model_predicts_alike_in_plain_pytorch_in_onnx_and_from_the_command_line(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    from PIL import Image

    words = shown_line("docs/get-started.md", "data.name=photos")
    assert main([*words, "--methods", "fedseq", "--rounds", "8", *QUICK]) == 0
    assert main(["export", "runs/photos", "--out", "taken"]) == 0
    files = []
    for path in sorted(photos.glob("test/*/*.png")):  # what the model sees, so that plain programs need no resizing
        files.append(tmp_path / "seen" / path.parent.name / path.name)
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            image.crop((0, 0, 32, 32)).save(files[-1])
    capsys.readouterr()
    assert main(["predict", "taken", *map(str, files), "--format", "csv"]) == 0
    ours = [row[1] for row in csv.reader(capsys.readouterr().out.splitlines()[1:])]
    program = [sys.executable, "-c", IN_PLAIN_PYTORCH_AND_ONNX, *map(str, files)]
    shown = subprocess.run(program, cwd="taken", capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    names = ["cat", "dog"]
    for scores in json.loads(shown.stdout):
        assert [names[best] for best in scores] == ours
    assert set(ours) == set(names), "a model that always says the same would agree with itself"
