"""Code of cells, which is written again, has no file, and is stopped and goes on: what a notebook does to a library."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn

import fedkeep
from fedkeep.cli.main import main
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.plugins import why_not_importable
from fedkeep.models import own_code
from fedkeep.options import Options, named_subclasses
from fedkeep.rounds.messages import Fault

X = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Interrupted(fedkeep.Callback):
    def on_round_end(self, state: Any, result: Any) -> None:
        if result.record["round"] == 2:
            raise KeyboardInterrupt


class Limit(fedkeep.ReplyStep):
    def __init__(self, largest: float) -> None:
        self.largest = largest

    def screen(self, round: Any, replies: Any) -> Any:
        for reply in replies:
            if reply.value.loss > self.largest:
                yield reply, Fault("large")


def silent(progress: Any) -> None:
    pass


def run(**given: Any) -> fedkeep.RunResult:
    usual = {
        "data": (X, Y, X, Y),
        "partition": fedkeep.IID(num_clients=2),
        "model": "mlp",
        "rounds": 3,
        "seeds": 1,
        "cohort_size": 2,
        "methods": "fedavg",
        "on_progress": silent,
    }
    return fedkeep.run(**{**usual, **given})


def cell(code: str, **space: Any) -> Any:
    """Return the class or function of a cell, which Python has no source of."""
    space |= {"nn": nn, "torch": torch, "__name__": __name__}
    exec(compile(code, "<cell>", "exec"), space)  # noqa: S102  # as a notebook does
    return space["Net"]


NET = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
"""


class Named(Options):
    pass


def test_a_name_stands_for_the_class_of_the_last_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook: Any = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    of_cells = {"__module__": "notebook"}

    def found() -> dict[str, type[Named]]:
        return named_subclasses(Named, lambda cls: getattr(cls, "title", None), "Rename yours.")

    base = type("Base", (Named,), of_cells)
    old = type("Mine", (base,), {**of_cells, "title": "mine"})  # found last, since it is an heir of an heir
    new = type("Mine", (Named,), {**of_cells, "title": "mine"})
    notebook.Mine = new
    assert found()["mine"] is new
    notebook.Mine = old
    assert found()["mine"] is old
    notebook.Renamed = renamed = type("Renamed", (Named,), {**of_cells, "title": "mine"})
    with pytest.raises(ConfigError, match="are both named 'mine'"):
        found()
    del notebook.Mine
    assert found()["mine"] is renamed
    notebook.Third = third = type("Third", (Named,), {**of_cells, "title": "mine"})
    del notebook.Renamed
    assert found()["mine"] is third


def test_a_class_that_is_edited_in_place_is_another() -> None:
    net, edited = cell(NET), cell(NET.replace("relu", "tanh"))
    before = repr(own_code.describe(net))
    net.forward.__code__ = edited.forward.__code__  # as autoreload does
    assert repr(own_code.describe(net)) != before


def test_a_number_that_is_stored_into_a_part_is_read_not_changed() -> None:
    code = NET.replace("        return", "        x[:, 0] = TAU\n        return")
    described = [repr(own_code.describe(cell(code, TAU=tau))) for tau in (1.0, 1.0, 50.0)]
    assert described[0] == described[1] != described[2]


@pytest.mark.parametrize("make", [lambda net: net, lambda net: net()], ids=["class", "object"])
def test_weights_of_another_network_are_told(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, other = cell(NET), cell(NET.replace("torch.relu(", "-torch.sigmoid("))
    done = run(model=make(net), rounds=1, out=tmp_path / "run")
    folder = fedkeep.export_model(done, network=net, out=tmp_path / "exported", onnx=False)
    again = fedkeep.read_run(done.path)
    with caplog.at_level(logging.WARNING):
        for same in (net, net(), lambda: net()):
            again["fedavg"].model(same)
            fedkeep.load_model(folder, network=same)
        assert "other code" not in caplog.text
        again["fedavg"].model(other)
        fedkeep.load_model(folder, network=other)
    assert caplog.text.count("has other code or numbers than the network that was trained") == 2


def test_what_stops_says_how_it_goes_on_in_python(tmp_path: Path) -> None:
    net = cell(NET)
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(model=net, callbacks=[Interrupted()], out=tmp_path / "run")
    (note,) = stopped.value.__notes__
    assert note.endswith("run', model=..., callbacks=...) in Python")
    with pytest.raises(RunError, match=r"Choose another out, or continue it with: fedkeep.resume\(.*, model=...\)"):
        run(model=net, out=tmp_path / "run")
    assert len(fedkeep.resume(tmp_path / "run", model=net, on_progress=lambda progress: None)["fedavg"].rounds) == 3


def test_other_reply_steps_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for limit, told in ((10.0, False), (5.0, True)):
        folder = tmp_path / str(limit)
        with pytest.raises(KeyboardInterrupt):
            run(steps=[Limit(10.0)], callbacks=[Interrupted()], out=folder)
        with pytest.raises(RunError, match=r"begun with reply steps of your own \(Limit\)"):
            fedkeep.resume(folder)
        assert main(["resume", str(folder)]) == 1, "a command cannot give them"
        caplog.clear()
        fedkeep.resume(folder, steps=[Limit(limit)], on_progress=silent)
        assert ("other code or numbers of its reply steps" in caplog.text) == told
        assert fedkeep.resume(folder)["fedavg"].rounds, "of a finished run nothing goes on"
    with pytest.raises(ConfigError, match="each trial has copies of Limit, which cannot be made"):
        run(steps=[Limit(Lock())], out=tmp_path / "locked")  # type: ignore[arg-type]
    assert not (tmp_path / "locked").exists()


def test_classes_of_cells_are_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main: Any = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    net = cell(NET)
    net.__module__ = "__main__"
    (file := tmp_path / "program.py").write_text(NET)
    for given in (None, "<stdin>", str(file)):  # some notebooks set it, to the file of the page
        if given:
            main.__file__ = given
        assert "notebook" in str(why_not_importable(net))
    code = NET + "@torch.no_grad()\ndef net(shape, classes):\n    return Net()\n"  # whose wrapper is PyTorch's
    exec(compile(code, str(file), "exec"), space := {"nn": nn, "torch": torch, "__name__": "__main__"})  # noqa: S102
    assert why_not_importable(space["Net"]) is why_not_importable(space["net"]) is None
    main.__spec__ = types.SimpleNamespace(name="package.__main__")  # which workers do not import
    assert "notebook" in str(why_not_importable(space["Net"]))


PIPED = """
import os, fedkeep, torch, beside
os.chdir("project")
from mynet import net  # which only lies here
if __name__ == "__main__":
    x = torch.randn(80, 6)
    y = (x[:, 0] > 0).long()
    given = dict(data=(x, y, x, y), partition=fedkeep.IID(num_clients=2), rounds=1, cohort_size=2, methods="fedavg")
    machine = fedkeep.Machine(workers=2)
    fedkeep.run(**given, model=net, seeds=2, machine=machine, out="run", on_progress=lambda progress: None)
"""


def test_a_piped_program_in_another_folder_has_workers(tmp_path: Path) -> None:
    (project := tmp_path / "project").mkdir()
    (tmp_path / "beside.py").write_text("")
    (project / "mynet.py").write_text(
        "import beside\nfrom torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(6, 2))\n"
    )
    environment = os.environ | {"FEDKEEP_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-"]
    done = subprocess.run(
        command, input=PIPED, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "One process" not in done.stderr
    assert {trial.seed for trial in fedkeep.read_run(project / "run").trials} == {0, 1}
