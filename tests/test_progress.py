import pytest

from fedkeep._utils import progress


def test_what_is_said_is_heard_in_the_block_alone() -> None:
    heard: list[str] = []
    with progress.subscribe(lambda word, _: heard.append(word), every=0.0):
        progress.report("images drawn", 512, 6000)
        with progress.subscribe(lambda word, _: heard.append(f"inner {word}"), every=0.0):
            progress.report("search", 17)
        progress.report("search", 18)
    progress.report("search", 19)
    assert heard == ["images drawn 512/6,000", "inner search 17", "search 18"]


def test_it_is_heard_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with progress.subscribe(lambda word, _: heard.append(word)):
        for tenth in range(50):
            now = tenth / 10
            progress.report("step", tenth)
    assert heard == ["step 20", "step 40"]


def test_a_step_inside_a_client_is_a_part_of_the_round() -> None:
    heard: list[tuple[str, float]] = []
    with progress.subscribe(lambda word, part: heard.append((word, part)), every=0.0):
        progress.report("step", 2, 8, inside=True)
        progress.report("train", 2, 4)
        progress.report("step", 30, 60, inside=True)
        progress.report("train", 3)
        progress.report("step", 30, 60, inside=True)
    assert heard == [
        ("step 2/8", 0.25),
        ("train 2/4", 0.5),
        ("train 2/4, step 30/60", 0.625),
        ("train 3", 0.0),
        ("train 3, step 30/60", 0.0),
    ]
