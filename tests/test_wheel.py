"""The wheel holds every file of the package, and what is installed from it runs in a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def execute(*words: str | Path, cwd: Path, **environment: str) -> str:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FEDKEEP_DATA"))}
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=plain | OFFLINE | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree, without its build folder, whose old files would hide a missing one."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT / "fedkeep", source / "fedkeep", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip"]
    execute(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    (path,) = folder.glob("fedkeep-*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fedkeep").rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected


def test_the_citation_is_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_an_installed_wheel_runs_the_demo_elsewhere(wheel: Path, tmp_path: Path) -> None:
    environment, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    execute(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    execute(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-compile", wheel, cwd=tmp_path
    )
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # nothing is downloaded
    few = ["--rounds", "1", "--seeds", "0", "--methods", "fedavg,sfedkd", "--workers", "1"]
    printed = execute(environment / "bin" / "fedkeep", "run", *few, "--quiet", "--out", "run", cwd=elsewhere)
    assert "SFedKD" in printed
    assert (packages / "fedkeep" / "__pycache__").is_dir(), "another FedKeep was imported"
    report = (elsewhere / "run" / "report.html").read_text()
    assert "<style>" in report
    assert "SFedKD" in report
