"""Adding a method is one file: nothing else has to know of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

from fedkeep.cli import main
from fedkeep.errors import ConfigError, MissingExtra, require_optional

METHOD = '''
from dataclasses import dataclass

import torch

from fedkeep.aggregation import weighted_mean
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.models import Weights
from fedkeep.losses import CrossEntropy
from fedkeep.options import option


@dataclass
class Diary:
    visits: int = 0


@dataclass
class Sent:
    trained: Fit
    visits: int


@dataclass(frozen=True)
class OneFile(Algorithm[Diary, Diary]):
    """Federated averaging that counts visits."""

    title = "OneFile"
    paper = "Nobody, 2026: A method in one file"

    share: float = option(1.0, "share of the mean that is taken", low=0.0, high=1.0)

    def round(self, server: Server[Diary], cohort: Cohort) -> None:
        replies = cohort.ask(self.train, server.model)
        server.model = weighted_mean({client: sent.trained for client, sent in replies.items()})
        server.state.visits += sum(sent.visits for sent in replies.values())
        server.log("visits", server.state.visits)

    @on_client
    def train(self, client: Client[Diary], model: Weights) -> Sent:
        """Train, and tell how often."""
        client.state.visits += 1
        return Sent(client.fit(model, CrossEntropy()), client.state.visits)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "one_file.py"
    path.write_text(METHOD)
    return path


def test_a_new_method_is_one_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    recipe = tiny.write_recipe(tmp_path)
    words = ["--methods", "OneFile,fedavg", "--rounds", "2", "--set", "onefile.share=0.5", "--workers", "1"]
    code = main(["run", recipe, "--use", str(file), *words, "--out", str(tmp_path / "run")])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert "OneFile" in output.out
    trial = tmp_path / "run" / "trials" / "onefile-seed0"
    records = [json.loads(line) for line in (trial / "rounds.jsonl").read_text().splitlines()]
    assert [record["log"]["visits"] >= record["round"] * 2 for record in records] == [True, True]
    assert json.loads((trial / "trial.json").read_text())["options"] == {"share": 0.5}
    reference = tmp_path / "run" / "trials" / "fedavg-seed0"
    assert (trial / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes(), (
        "it is FedAvg, after all"
    )

    def unknown(*given: Any, **options: Any) -> Any:
        raise ConfigError("there is no method 'onefile'")

    monkeypatch.setattr("fedkeep.export.trained_model.parse_recipe", unknown)  # as in another process
    assert main(["export", str(tmp_path / "run"), "--method", "onefile"]) == 1
    copy = tmp_path / "run" / "code" / file.name
    assert f"code of its own, all of which is needed: --use {copy}" in capsys.readouterr().err


def test_it_is_listed_and_shown(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["methods", "--use", str(file)]) == 0
    listed = capsys.readouterr().out
    assert "onefile" in listed
    assert "A method in one file" in listed
    assert main(["methods", "onefile", "--use", str(file)]) == 0
    shown = capsys.readouterr().out
    for expected in ("share of the mean", "train: trained, visits", "counts visits"):
        assert expected in shown, expected


def test_without_the_file_the_error_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other_file.py").write_text(METHOD.replace("OneFile", "OtherFile"))
    assert main(["run", tiny.write_recipe(tmp_path), "--methods", "otherfile", "--out", str(tmp_path / "run")]) == 1
    output = capsys.readouterr().err
    assert "--use" in output
    assert "Traceback" not in output


def test_a_file_may_import_what_stands_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside_it.py").write_text(METHOD.replace("OneFile", "Beside"))
    heir = tmp_path / "heir_of_it.py"
    heir.write_text("from beside_it import Beside\n\nclass Heir(Beside):\n    title = 'Heir'\n")
    words = ["run", tiny.write_recipe(tmp_path), "--methods", "heir", "--rounds", "1", "--workers", "1"]
    for number, used in enumerate(([heir], [tmp_path / "beside_it.py", heir])):
        out = ["--out", str(tmp_path / str(number))]
        assert main([*words, *out, *(f"--use={path}" for path in used)]) == 0, capsys.readouterr().err
    lacking = tmp_path / "lacking.py"
    lacking.write_text("import not_beside_it\n")
    assert main([*words, "--use", str(lacking)]) == 1
    assert "needs 'not_beside_it', which is not beside it nor installed." in capsys.readouterr().err


def test_two_folders_with_helpers_of_one_name_are_told_apart(tmp_path: Path) -> None:
    from fedkeep.experiment.plugins import import_user_code

    for number in (1, 2):
        (tmp_path / f"h{number}").mkdir()
        (tmp_path / f"h{number}" / "one_named_helper.py").write_text(f"VALUE = {number}\n")
        (tmp_path / f"h{number}" / f"with_helper_{number}.py").write_text("from one_named_helper import VALUE\n")
    import_user_code([str(tmp_path / "h1" / "with_helper_1.py")])
    with pytest.raises(ConfigError, match=r"imports 'one_named_helper', and gets .*h1.*, not .*h2.*Rename"):
        import_user_code([str(tmp_path / "h2" / "with_helper_2.py")])


def test_so_are_packages_and_what_helpers_import(tmp_path: Path) -> None:
    from fedkeep.experiment.plugins import import_user_code

    for number in (1, 2):
        package = tmp_path / f"h{number}" / "one_named_package"
        package.mkdir(parents=True)
        (package / "values.py").write_text(f"VALUE = {number}\n")
        (package.parent / "equal_helper.py").write_text("from one_named_package.values import VALUE\n")
        (package.parent / f"with_package_{number}.py").write_text("from equal_helper import VALUE\n")
    import_user_code([str(tmp_path / "h1" / "with_package_1.py")])
    with pytest.raises(ConfigError, match=r"imports 'one_named_package.values', and gets .*h1.*, not .*h2"):
        import_user_code([str(tmp_path / "h2" / "with_package_2.py")])


def test_a_folder_with_the_name_of_an_extra_is_no_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_extra_by_name").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingExtra):
        require_optional("an_extra_by_name", "A logger", "tracking")


def test_a_relative_import_that_the_file_itself_catches_is_fine(tmp_path: Path) -> None:
    from fedkeep.experiment.plugins import import_user_code

    (tmp_path / "either_way.py").write_text(
        "try:\n    from .math import pi\nexcept ImportError:\n    from math import pi\n"
    )
    import_user_code([str(tmp_path / "either_way.py")])
    assert sys.modules["either_way"].pi > 3


def test_an_error_in_the_file_comes_through_as_it_is(tmp_path: Path) -> None:
    from fedkeep.experiment.plugins import import_user_code

    (tmp_path / "broken_file.py").write_text("import math\n\nmath.nothing_that_exists\n")
    for _ in range(2):  # a failed import is not remembered as a success
        with pytest.raises(AttributeError, match="nothing_that_exists"):
            import_user_code([str(tmp_path / "broken_file.py")])
