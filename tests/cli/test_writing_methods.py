"""What a method's author is told before anything runs, the file that is written for them, and shell completion."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedkeep.cli import main
from fedkeep.cli.completion import script
from fedkeep.experiment.plugins import import_user_code
from fedkeep.interface import get_algorithm
from fedkeep.testing import checks_for

MISTAKES = [  # what of the file is written wrong, how, and what is said
    ("def round(", "def ruond(", " does not define round. Is 'ruond' meant to be it?"),
    ("model: Weights) -> Fit", "model: Weights)", ".train has no type annotation of its result."),
    ("client: Client, model: Weights", "client, model", ".train has no type annotation of model."),
    ("    @on_client\n", "", "asks nothing of clients: mark what clients do with @on_client"),
]
HEIR = """
from dataclasses import dataclass
from fedkeep.algorithms.sequential.sfedkd import SFedKD

@dataclass(frozen=True)
class Heir(SFedKD):
    '''Inherits all, the title too.'''
"""
HEIR_MESSAGE = "Heir are both named 'sfedkd'. Give yours another title."
LOAD = """
import sys
from fedkeep.cli import main
sys.exit(sum(main(["methods", "fedavg", "--use", file]) for file in sys.argv[1:]))
"""


def test_a_mistake_is_named_when_the_file_is_loaded(tmp_path: Path) -> None:
    assert main(["new-method", "Draft", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "draft.py").read_text()
    files = []
    for number, (old, new, _) in enumerate(MISTAKES):
        assert old in text
        files.append(tmp_path / f"wrong{number}.py")
        files[-1].write_text(text.replace(old, new).replace("Draft", f"Draft{number}"))
    files.append(tmp_path / "heir.py")  # the last: its class stays, and so does the clash
    files[-1].write_text(HEIR)
    # Another process: a class that was once defined stays.
    done = subprocess.run([sys.executable, "-c", LOAD, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == len(files)
    output = done.stderr.splitlines()
    assert len(output) == len(files), done.stderr
    for line, message in zip(output, [*(message for _, _, message in MISTAKES), HEIR_MESSAGE], strict=True):
        assert message in line


def test_a_written_method_and_its_test_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-method", "MyFirstDraft", "--out", str(tmp_path)]) == 0
    assert f"fedkeep run --use {tmp_path}/my_first_draft.py --methods fedavg,myfirstdraft" in capsys.readouterr().out
    import_user_code([str(tmp_path / "my_first_draft.py")])
    for name, check in checks_for(get_algorithm("myfirstdraft")):
        if name in ("two_runs_are_equal", "resume", "lost_clients"):
            check()
    compile((tmp_path / "test_my_first_draft.py").read_text(), "test", "exec")
    assert main(["new-method", "MyFirstDraft", "--out", str(tmp_path)]) == 1, "nothing is overwritten"
    for name in ("sfedkd", "SFedKD", "class"):
        assert main(["new-method", name, "--out", str(tmp_path)]) == 1


@pytest.mark.slow
def test_all_of_the_written_test_passes(tmp_path: Path) -> None:
    assert main(["new-method", "WholeDraft", "--out", str(tmp_path)]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_whole_draft.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fedkeep re", {"reproduce", "resume", "recipes", "report"}),
        ("fedkeep run --rou", {"--rounds"}),
        ("fedkeep run --methods fedav", {"fedavg", "fedavgm"}),
        ("fedkeep methods sca", {"scaffold"}),
    ],
)
def test_completion_in_bash(words: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "completion.sh").write_text(script("bash"))
    given = words.split(" ")
    ask = f"COMP_WORDS=({words}) COMP_CWORD={len(given) - 1}; _fedkeep; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "-c", f"source completion.sh; {ask}"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == expected


def test_completion_of_zsh_uses_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out == f"autoload -U +X bashcompinit && bashcompinit\n{script('bash')}"
