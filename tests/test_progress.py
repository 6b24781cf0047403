import pytest

from fedkeep._utils import progress


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    return []


def test_nobody_need_listen() -> None:
    progress.report("images drawn", 1)


def test_what_is_said_is_heard_in_the_block_alone(heard: list[str]) -> None:
    with progress.subscribe(heard.append):
        progress.report("images drawn", 512, 6000)
        with progress.subscribe(lambda word: heard.append(f"inner {word}")):
            progress.report("search", 17)
        progress.report("search", 18)
    progress.report("search", 19)
    assert heard == ["images drawn 512/6,000", "inner search 17", "search 18"]


def test_it_is_heard_now_and_then(heard: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "EVERY", 2.0)
    monkeypatch.setattr("time.monotonic", lambda: now)
    with progress.subscribe(heard.append):
        for tenth in range(50):
            now = tenth / 10
            progress.report("step", tenth)
    assert heard == ["step 20", "step 40"]
