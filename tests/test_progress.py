import pytest

from fedkeep._utils import progress


def test_nobody_need_listen() -> None:
    progress.report("images drawn", 1)


def test_what_is_said_is_heard_in_the_block_alone() -> None:
    heard: list[str] = []
    with progress.subscribe(heard.append, every=0.0):
        progress.report("images drawn", 512, 6000)
        with progress.subscribe(lambda word: heard.append(f"inner {word}"), every=0.0):
            progress.report("search", 17)
        progress.report("search", 18)
    progress.report("search", 19)
    assert heard == ["images drawn 512/6,000", "inner search 17", "search 18"]


def test_it_is_heard_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with progress.subscribe(heard.append):
        for tenth in range(50):
            now = tenth / 10
            progress.report("step", tenth)
    assert heard == ["step 20", "step 40"]
