"""Recipes and settings that no reader expects end in one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from fedkeep.errors import ConfigError
from fedkeep.experiment.build import COPIES, build_federation, check_network
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe_loader import load_recipe, parse_recipe, parse_value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = " + "[" * 20_000, "nested too deeply"),
        ("seeds = [" + "9" * 5000 + "]", "4300 digits"),
        ('title = "\0"', "cannot read"),
        ("a" * 10 + "\ud800", "cannot read"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=says):
        load_recipe(str(path))
    if "\ud800" not in text:
        with pytest.raises(ConfigError, match=says):
            parse_recipe(text, "a message")


@pytest.mark.parametrize("name", ["a\0b.toml", "x" * 5000, "x" * 5000 + ".toml", "", "/", "\ud800"])
def test_names_that_no_recipe_has(name: str) -> None:
    with pytest.raises(ConfigError):
        load_recipe(name)


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 20_000])
def test_settings_that_toml_cannot_read_are_text(text: str) -> None:
    assert parse_value(text) == text


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/x"])
def test_names_that_no_generator_has(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"generator\.name cannot be"):
        load_recipe(tiny.write_recipe(tmp_path), settings=[f"generator.name={name}"])


def test_a_network_larger_than_memory_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), settings=["model.hidden=[262144, 262144]"])
    with pytest.raises(ConfigError, match=r"mlp has 256\.\d GiB of weights.*smaller"):
        Experiment(recipe).check()
    endless = load_recipe(tiny.write_recipe(tmp_path), settings=[f"model.hidden=[{10**18}, {10**18}]"])
    with pytest.raises(ConfigError, match="mlp cannot be built with these options"):
        Experiment(endless).check()


def test_what_training_needs_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path))
    size, federation = 4 * (64 * 8 + 8 + 8 * 10 + 10), build_federation(recipe, 0)
    monkeypatch.setattr("fedkeep.experiment.build._memory", lambda: COPIES * size)
    check_network(recipe.model, federation)
    monkeypatch.setattr("fedkeep.experiment.build._memory", lambda: COPIES * size - 1)
    with pytest.raises(ConfigError, match="Training needs 4 times that"):
        check_network(recipe.model, federation)
