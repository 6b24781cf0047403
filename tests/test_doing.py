import pytest

from fedkeep import doing


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(doing, "EVERY", 0.0)
    return []


def test_nobody_need_listen() -> None:
    doing.say("images drawn", 1)


def test_what_is_said_is_heard_in_the_block_alone(heard: list[str]) -> None:
    with doing.heard_by(heard.append):
        doing.say("images drawn", 512, 6000)
        with doing.heard_by(lambda word: heard.append(f"inner {word}")):
            doing.say("search", 17)
        doing.say("search", 18)
    doing.say("search", 19)
    assert heard == ["images drawn 512/6,000", "inner search 17", "search 18"]


def test_it_is_heard_now_and_then(heard: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(doing, "EVERY", 2.0)
    monkeypatch.setattr("time.monotonic", lambda: now)
    with doing.heard_by(heard.append):
        for tenth in range(50):
            now = tenth / 10
            doing.say("step", tenth)
    assert heard == ["step 20", "step 40"]
