"""What ``fedkeep doctor`` finds, and what it says to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeep.cli import doctor, main
from fedkeep.cli.doctor import DoctorLine, run_checks


def by_subject(data_dir: str | None = None) -> dict[str, DoctorLine]:
    return {check.subject: check for check in run_checks(data_dir)}


def test_all_subjects_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown
    for subject in ("versions", "packages", "processor", "GPU", "data", "cache", "extra data", "extra tracking"):
        assert subject in shown, subject
    assert "fedkeep run" in shown


def test_missing_packages_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor.version

    def without(name: str) -> str:
        if name in ("ray", "scipy"):
            raise doctor.PackageNotFoundError(name)
        return "0.1" if name == "onnx" else real(name)

    needs = ["scipy>=1", "ray>=4; extra == 'ray'", "onnx>=1; extra == 'export'", "pillow; extra == 'data'"]
    monkeypatch.setattr(doctor, "requires", lambda name: needs)
    monkeypatch.setattr(doctor, "version", without)
    found = by_subject()
    assert "ray" in found["extra ray"].found
    assert "pip install" in found["extra ray"].advice
    assert "onnx" in found["extra export"].found, "which is too old"
    assert not found["extra data"].advice
    assert "scipy" in found["packages"].advice
    assert main(["doctor"]) == 1


def test_data_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    assert "FEDKEEP_DATA" in by_subject()["data"].advice
    assert "correct" in by_subject(str(tmp_path / "missing"))["data"].advice
    assert "fashion_mnist" in by_subject(str(tmp_path))["data"].advice
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "a" / "b"))
    assert str(tmp_path / "a" / "b") in by_subject()["cache"].found
    assert not (tmp_path / "a").exists(), "it only looks"
