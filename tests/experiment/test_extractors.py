"""What a run says of frozen extractors: whose they are, what they have seen, and whether that was the run's classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small_extractor
import tiny

from fedkeep.experiment.build import build_federation
from fedkeep.experiment.experiment import describe_trial
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.models.pretrained import load_extractor

CLIENTS = '\n[[client_models]]\nclients = ["1-2"]\nname = "pretrained"\nsource = "{}"\n'


def described(folder: Path, model: str, clients: str = "", settings: tuple[str, ...] = ()) -> dict[str, Any]:
    text = tiny.RECIPE.replace('algorithm = "fedavg"', 'algorithm = "ft-kd"') + '\n[public]\nname = "digits"\n'
    text = text.replace('name = "mlp"\nhidden = [8]', model) + (CLIENTS.format(clients) if clients else "")
    recipe = load_recipe(tiny.write_recipe(folder, text), methods=["ft-kd"], settings=settings)
    return describe_trial(recipe, recipe.methods[0], 0, build_federation(recipe, 0))


def learn(folder: str, *label_names: str) -> None:
    """Let a checkpoint say of which classes it is."""
    config = Path(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"id2label": dict(enumerate(label_names))}))
    load_extractor.cache_clear()


@pytest.mark.parametrize(
    ("learned", "output"),
    [
        (("cat", "dog", "owl", "hen"), "by their names it learned none of this run's 10 classes"),
        (("mnist: 3", "dog", "7", "hen"), "by their names it learned 2 of this run's 10 classes"),
        ((), "whether it learned classes of this run is not known"),
    ],
)
def test_how_many_of_the_runs_classes_the_servers_has_learned(
    tmp_path: Path, learned: tuple[str, ...], output: str
) -> None:
    source = small_extractor.save(tmp_path / "extractor")
    load_extractor.cache_clear()
    if learned:
        learn(source, *learned)
    shown = described(tmp_path, f'name = "pretrained"\nsource = "{source}"')
    assert shown["extractor"].startswith(f"{source}: vit")
    assert shown["extractor"].endswith(output)
    assert shown["dependencies"]["extractor"] == load_extractor(source).hash()


def test_only_classes_that_arrive_count(tmp_path: Path) -> None:
    source = small_extractor.save(tmp_path / "extractor")
    learn(source, "3", "8", "cat", "dog")
    tasks = ("tasks.num_tasks=2", "tasks.num_classes=4", "tasks.class_order=source")
    shown = described(tmp_path, f'name = "pretrained"\nsource = "{source}"', settings=tasks)
    assert shown["extractor"].endswith("it learned 1 of this run's 4 classes")


def test_those_of_clients_are_named_too(tmp_path: Path) -> None:
    one, two = (small_extractor.save(tmp_path / name) for name in ("one", "two"))
    learn(two, "3", "8", "cat", "dog")
    model = 'name = "mlp"\nhidden = [8]'
    alone = described(tmp_path, model, two)
    assert alone["extractor"].startswith(f"clients 1-2: {two}: vit")
    always = {"training data", "partition", "public data", "extractor of clients 1-2"}
    assert alone["dependencies"].keys() == always
    both = described(tmp_path, f'name = "pretrained"\nsource = "{one}"', two)
    assert both["extractor"].split("; ")[0].startswith(f"{one}: vit")
    assert both["dependencies"].keys() == {*always, "extractor"}
    assert "extractor" not in described(tmp_path, model)


def test_a_class_may_have_several_names(tmp_path: Path) -> None:
    source = small_extractor.save(tmp_path / "extractor")
    learn(source, "beaver, castor", "3", "tench", "9, nine")
    assert load_extractor(source).learned == ("beaver", "castor", "3", "tench", "9", "nine")
    shown = described(tmp_path, f'name = "pretrained"\nsource = "{source}"')
    assert shown["extractor"].endswith("it learned 2 of this run's 10 classes")
