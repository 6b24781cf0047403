"""The tools that digest what users compute know all methods and can run."""

from __future__ import annotations

from pathlib import Path

import equality
import pytest
import reply_golden


def test_digests_of_a_method_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path))  # which the tool sets, and nobody after this test should find
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for file in files:
        assert equality.play_all(file, "fedavg/plain/codec") == 0, capsys.readouterr().out
    assert equality.compare(files, "*") == 0
    files[1].write_text(files[1].read_text().replace("training loss", "loss"))
    assert equality.compare(files, "*") == 1
    assert "fedavg/plain/codec: training loss, loss" in capsys.readouterr().out


def test_digests_of_a_reply_repeat() -> None:
    cases = reply_golden.cases()
    one, again = (reply_golden.digests(cases["fedavg/tight/scaled_update"]()) for _ in range(2))
    assert one == again != reply_golden.digests(cases["fedavg/none/scaled_update"]())
