"""Options: the same checks and words for Python, recipes and the command line."""

from __future__ import annotations

import dataclasses
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, Literal

import pytest
import tiny
from each import for_each

from fedkeep.errors import ConfigError, did_you_mean
from fedkeep.interface import Algorithm, Training, algorithms
from fedkeep.options import NO_OPTION, Options, as_table, build, describe_type, option, options_of
from fedkeep.rounds.run_settings import RunSettings


@dataclass(frozen=True)
class Sample(Options):
    count: int = option(3, "how many", low=1, high=9)
    share: float = option(0.5, "how much", low=0.0, high=1.0)
    on: bool = option(False, "whether")
    name: str = option("x", "what")
    kind: Literal["big", "small"] = option("big", "which")
    sizes: tuple[int, ...] = option((1, 2), "each", low=1)
    limit: float | None = option(None, "at most", low=0.0)
    hidden: int = dataclasses.field(default=7, metadata=NO_OPTION)  # the recipe does not see it


@dataclass(frozen=True)
class Picky(Sample):
    extra: int = option(0, "more")

    def check(self) -> None:
        if self.extra > self.count:
            raise ConfigError("Picky.extra exceeds Picky.count.")


def test_a_field_that_is_no_option_is_refused() -> None:
    @dataclass(frozen=True)
    class Forgetful(Sample):
        rate: float = 0.3

    with pytest.raises(ConfigError, match=r"Forgetful\.rate is no option.*Write: rate: float = option\("):
        Forgetful(rate=0.5)


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("count", 1, 1),
        ("count", 9, 9),
        ("share", 1, 1.0),
        ("share", 0, 0.0),
        ("on", True, True),
        ("kind", "small", "small"),
        ("sizes", [4, 5], (4, 5)),
        ("sizes", (), ()),
        ("limit", "none", None),
        ("limit", None, None),
        ("limit", 2, 2.0),
        ("name", "", ""),
    ],
)
def test_good_values_are_kept_as_their_type(name: str, given: Any, kept: Any) -> None:
    value = getattr(Sample(**{name: given}), name)
    assert value == kept
    assert type(value) is type(kept)


@pytest.mark.parametrize(
    ("name", "given", "output"),
    [
        ("count", 0, "1 to 9, not 0"),
        ("count", 10, "1 to 9, not 10"),
        ("count", 2.0, "an integer, not 2.0"),
        ("count", True, "an integer"),
        ("count", "2", "an integer, not '2'"),
        ("count", None, "an integer"),
        ("share", 1.01, "0.0 to 1.0"),
        ("share", float("nan"), "finite"),
        ("share", False, "a number"),
        ("share", "0.5", "a number"),
        ("share", float("inf"), "finite"),
        ("on", 1, "true or false"),
        ("on", "true", "true or false"),
        ("name", 3, "a text"),
        ("kind", "bigger", "Did you mean 'big'"),
        ("kind", 3, "Known: big, small"),
        ("kind", ["big"], "cannot be"),
        ("sizes", 3, "a list of an integer"),
        ("sizes", [1, 0], "at least 1, not 0"),
        ("sizes", [1, "2"], "an integer"),
        ("sizes", [1.5], "an integer"),
        ("limit", -1, "at least 0.0"),
        ("limit", "nothing", "a number"),
        ("limit", 10**400, "a number"),
    ],
)
def test_bad_values_are_refused_with_name_and_reason(name: str, given: Any, output: str) -> None:
    with pytest.raises(ConfigError, match=f"Sample.{name} .*{output}"):
        Sample(**{name: given})


def test_options_may_contradict_each_other() -> None:
    assert Picky(extra=3).extra == 3
    with pytest.raises(ConfigError, match="exceeds"):
        Picky(extra=4)
    with pytest.raises(ConfigError, match=r"here: Picky.extra exceeds"):
        build(Picky, {"extra": 4}, "here")


def test_building_from_a_table() -> None:
    assert build(Sample, {"count": 4, "sizes": [7]}, "here") == Sample(count=4, sizes=(7,))
    with pytest.raises(ConfigError, match=r"here: there is no option 'cuont'. Did you mean 'count'?"):
        build(Sample, {"cuont": 4}, "here")
    with pytest.raises(ConfigError, match="no option 'hidden'"):
        build(Sample, {"hidden": 4}, "here")
    with pytest.raises(ConfigError, match=r"here: Sample.count must be 1 to 9, not 0"):
        build(Sample, {"count": 0}, "here")


def test_a_table_builds_the_same_options_again() -> None:
    value = Sample(count=9, limit=2.5, sizes=(3, 4), kind="small")
    table = as_table(value)
    assert table == {"count": 9, "share": 0.5, "on": False, "name": "x", "kind": "small", "sizes": [3, 4], "limit": 2.5}
    assert build(Sample, table, "") == value
    assert "limit" not in as_table(Sample())


def test_options_are_known_by_name_and_frozen() -> None:
    assert list(options_of(Picky)) == ["count", "share", "on", "name", "kind", "sizes", "limit", "extra"]
    with pytest.raises(FrozenInstanceError):
        Sample().count = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "an integer"),
        (float | None, "a number or none"),
        (tuple[int, ...], "a list of an integer"),
        (bool, "true or false"),
        (Literal["a", 2], "a | 2"),
    ],
)
def test_types_in_plain_words(hint: Any, words: str) -> None:
    assert describe_type(hint) == words


def test_did_you_mean() -> None:
    assert did_you_mean("fedsq", ["fedavg", "fedseq"]) == " Did you mean 'fedseq'? Known: fedavg, fedseq."
    assert did_you_mean("zzz", ["b", "a"]) == " Known: a, b."
    assert did_you_mean("zzz", []) == ""


@for_each([Training, RunSettings, *(c for c in algorithms().values() if c.__module__.startswith("fedkeep."))])
def test_every_option_of_the_package_survives_a_table_and_says_what_it_is(cls: type[Options]) -> None:
    options = tiny.configured(cls) if issubclass(cls, Algorithm) else cls()
    assert build(cls, as_table(options), "") == options
    for name, field in options_of(cls).items():
        assert len(field.metadata["doc"]) > 3, name


def test_the_learning_rate_decays_by_round() -> None:
    training = Training(lr=0.5, lr_decay=0.5)
    assert [training.lr_in_round(number) for number in (1, 2, 3)] == [0.5, 0.25, 0.125]


def test_when_a_round_is_evaluated() -> None:
    plan = RunSettings(rounds=7, evaluate_every=3)
    assert [number for number in range(1, 8) if plan.is_due(number)] == [3, 6, 7]
