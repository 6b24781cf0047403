"""Networks of the user's own, as tutorials write them: they train, or are refused before anything is trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

import fedkeep
from fedkeep.errors import ConfigError, DataError, RunError
from fedkeep.models import Network
from fedkeep.models.custom import custom
from fedkeep.reporting.run_folder import read_run
from fedkeep.training.model_runner import ModelRunner

CLASSES = 4


def images(side: int, count: int = 40) -> tuple[Any, ...]:
    x = np.random.default_rng(0).integers(0, 200, size=(count, 1, side, side)).astype(np.uint8)
    y = np.arange(count) % CLASSES
    return x[:-8], y[:-8], x[-8:], y[-8:]


def rows(count: int = 60) -> tuple[Any, ...]:
    y = np.arange(count) % CLASSES
    x = (np.random.default_rng(0).normal(size=(count, 8)) + 3 * np.eye(8)[y]).astype(np.float32)
    return x[:-12], y[:-12], x[-12:], y[-12:]


def run(model: Any, out: Path, **changes: Any) -> fedkeep.RunResult:
    given: dict[str, Any] = {"partition": fedkeep.IID(num_clients=2), "methods": ["fedavg"], "seeds": [0], "rounds": 1}
    given |= {"training": fedkeep.SGD(lr=0.1, epochs=1), "data": rows()}
    return fedkeep.run(model=model, out=out, on_progress=lambda _: None, **(given | changes))


class Tutorial(nn.Module):
    """The network of PyTorch's tutorial, whose view needs the contiguous layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(1, 4, 3), nn.MaxPool2d(2)
        self.hidden, self.last = nn.Linear(36, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.pool(torch.relu(self.conv(x)))
        logits: Tensor = self.last(torch.relu(self.hidden(maps.view(-1, 36))))
        return logits


class FrozenStem(nn.Module):
    """Its group norm has no gradient to give on; with channels last, PyTorch 2.13 ends the process there."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, bias=False).requires_grad_(False)
        self.norm, self.conv, self.last = nn.GroupNorm(2, 4), nn.Conv2d(4, 6, 3), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        maps = torch.relu(self.conv(torch.relu(self.norm(self.stem(x)))))
        logits: Tensor = self.last(maps.mean((2, 3)))
        return logits


class Features(Tutorial):
    """The tutorial's network as features, in a network of the two parts."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(self.pool(torch.relu(self.conv(x))).view(-1, 36)))


class TwoParts(Network):
    def __init__(self) -> None:
        super().__init__(Features(), 8, CLASSES)


@pytest.mark.parametrize("network", [Tutorial, FrozenStem, TwoParts])
def test_networks_of_users_keep_the_contiguous_layout(network: Any, tmp_path: Path) -> None:
    runner = ModelRunner(lambda: custom(network).build((1, 8, 8), CLASSES), 0, torch.device("cpu"))
    assert runner.layout == torch.contiguous_format
    assert not runner.stackable
    assert run(network, tmp_path / "run", data=images(8), pretraining={"passes": 1}).trials[0].finished


class Shuffled(nn.Module):
    """It reads the features in a random order, which only a persistent buffer keeps."""

    how = "persistent"

    def __init__(self) -> None:
        super().__init__()
        order = torch.randperm(8)
        if self.how == "attribute":
            self.order = order
        else:
            self.register_buffer("order", order, persistent=self.how == "persistent")
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(x[:, self.order])
        return logits


@pytest.mark.parametrize("how", ["not persistent", "attribute"])
def test_what_a_network_draws_and_no_state_dict_holds_is_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(Shuffled, tmp_path / "held").trials[0].finished
    monkeypatch.setattr(Shuffled, "how", how)
    with pytest.raises(ConfigError, match="gives other outputs when it is built again and gets the same weights"):
        run(Shuffled, tmp_path / "run")


class Listed(Tutorial):
    """It reads weights from a list that other weights never reach."""

    def __init__(self) -> None:
        super().__init__()
        self.of_hidden = [self.hidden.weight, self.hidden.bias]

    def forward(self, x: Tensor) -> Tensor:
        maps = self.pool(torch.relu(self.conv(x))).flatten(1)
        logits: Tensor = self.last(torch.relu(nn.functional.linear(maps, *self.of_hidden)))
        return logits


@pytest.mark.parametrize("network", [Listed, Listed()])
def test_weights_that_are_read_elsewhere_are_refused(network: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="and read weights where they are registered"):
        run(network, tmp_path / "run", data=images(8))


VECTORS = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))


class Pretrained(nn.Module):
    """Its embedding is memory of the program's own; id 1 fills texts up, as in torchtext."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding.from_pretrained(VECTORS, freeze=False), nn.Linear(8, classes)

    def forward(self, ids: Tensor) -> Tensor:
        held = (ids != 1)[:, :, None]
        logits: Tensor = self.last((self.words(ids) * held).sum(1) / held.sum(1))
        return logits


def test_the_trial_changes_no_memory_of_the_program(tmp_path: Path) -> None:
    before = VECTORS.clone()
    ids = np.random.default_rng(0).integers(2, 20, (40, 6))
    ids[:, 4:] = 1
    changes: dict[str, Any] = {"methods": ["fedlwf"], "settings": ["tasks.num_tasks=2"]}
    run(Pretrained, tmp_path / "run", data=(ids, np.arange(40) % CLASSES), **changes)
    assert torch.equal(before, VECTORS)


class Asserting(nn.Module):
    """It takes some weights only."""

    def __init__(self) -> None:
        super().__init__()
        self.share, self.last = nn.Parameter(torch.full((8,), 0.95)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        assert bool((self.share > 0.93).all())
        logits: Tensor = self.last(x * self.share)
        return logits


def test_weights_of_bounds_are_not_tried_beyond_them(tmp_path: Path) -> None:
    assert run(Asserting, tmp_path / "run", training=fedkeep.SGD(lr=0.001)).trials[0].finished


class SavesWhatItTrains(nn.Module):
    """As adapters do, whose frozen body comes from elsewhere; and it loads in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, CLASSES)

    def state_dict(self, *args: Any, **changes: Any) -> Any:
        whole, prefix = super().state_dict(*args, **changes), changes.get("prefix", "")
        for name in [name for name in whole if name.removeprefix(prefix).startswith("body.")]:
            del whole[name]
        return whole

    def load_state_dict(self, path: Path) -> Any:  # type: ignore[override]
        return super().load_state_dict(load_file(path))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.relu(self.body(x)))
        return logits


def test_a_network_saves_and_loads_as_it_likes(tmp_path: Path) -> None:
    assert run(SavesWhatItTrains, tmp_path / "run").trials[0].finished


class Scaled(nn.Module):
    """It cannot be split: its logits are more than a linear layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last, self.scale = nn.Linear(8, 8), nn.Linear(8, CLASSES), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.scale * self.last(torch.relu(self.hidden(x)))
        return logits


class Fixed(nn.Linear):
    """A classifier whose weight is a buffer."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__(width, rows)
        weight = self.weight.detach()
        del self.weight
        self.register_buffer("weight", weight)


class Cosine(nn.Linear):
    """The classifier of LUCIR, with a scale that is learned."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__(width, rows, bias=False)
        self.sigma = nn.Parameter(torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.sigma * nn.functional.linear(nn.functional.normalize(x), nn.functional.normalize(self.weight))


class ByClass(nn.Linear):
    def __init__(self, width: int, rows: int) -> None:
        super().__init__(width, rows)
        self.scale = nn.Parameter(torch.ones(rows))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class WithClassifier(nn.Module):
    def __init__(self, classifier: nn.Linear) -> None:
        super().__init__()
        self.body, self.classifier = nn.Linear(8, 8), classifier

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


def test_a_classifier_grows_by_the_rows_that_it_trains(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"methods": ["finetune"], "settings": ["tasks.num_tasks=2"]}
    run(lambda shape, classes: WithClassifier(Cosine(8, classes)), tmp_path / "cosine", **changes)
    for kind in (Fixed, ByClass):
        with pytest.raises(ConfigError, match="with a plain weight"):
            run(lambda shape, classes, kind=kind: WithClassifier(kind(8, classes)), tmp_path / "fixed", **changes)


class FrozenBias(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        self[2].bias.requires_grad_(False)


class FrozenLast(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES).requires_grad_(False))


@pytest.mark.parametrize(
    ("network", "why"),
    [(Scaled, "must be a torch.nn.Linear with a plain weight"), (FrozenLast, "is frozen"), (FrozenBias, "is frozen")],
)
def test_a_network_that_cannot_grow_is_refused_before_the_first_task(network: Any, why: str, tmp_path: Path) -> None:
    def built(shape: Any, classes: int) -> nn.Module:
        whole: nn.Module = network()
        last = whole.last if isinstance(whole, Scaled) else whole[2]  # type: ignore[index]
        last.out_features = classes
        last.weight = nn.Parameter(last.weight[:classes].detach(), last.weight.requires_grad)
        last.bias = nn.Parameter(last.bias[:classes].detach(), last.bias.requires_grad)
        return whole

    with pytest.raises(ConfigError, match=why):
        run(built, tmp_path / "run", methods=["finetune"], settings=["tasks.num_tasks=2"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("network", [Scaled, FrozenLast])
def test_ewc_kd_ends_its_only_task_with_any_network(network: Any, tmp_path: Path) -> None:
    x, y, *_ = rows()
    np.savez(tmp_path / "public.npz", x=x, y=y)
    settings = [f"public.name={tmp_path / 'public.npz'}"]
    assert run(network, tmp_path / "run", methods=["ewc-kd"], settings=settings).trials[0].finished


def test_a_file_with_one_of_two_tied_weights_fits(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, CLASSES)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.last(torch.relu(self.two(self.one(x))))
            return logits

    torch.manual_seed(1)
    network = Tied()
    save_model(network, str(tmp_path / "tied.safetensors"))
    by_file = run(Tied, tmp_path / "file", weights=str(tmp_path / "tied.safetensors"))
    by_value = run(Tied, tmp_path / "value", weights=network.state_dict())
    assert by_file.trials[0].rounds == by_value.trials[0].rounds


class Padded(nn.Module):
    """It leaves out what fills texts up, of which each has something."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(20, 8), nn.Linear(8, classes)

    def forward(self, ids: Tensor) -> Tensor:
        held = (ids != 0)[:, :, None]
        logits: Tensor = self.last((self.words(ids) * held).sum(1) / held.sum(1))
        return logits


class Standardised(nn.Module):
    """It divides by the deviation of each image."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        logits: Tensor = self.last((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True))
        return logits


@pytest.mark.parametrize("network", [Padded, Standardised])
@pytest.mark.parametrize(("method", "settings"), [("moon", []), ("fedlwf", ["tasks.num_tasks=2"])])
def test_networks_that_cannot_read_zeros_are_split(
    network: Any, method: str, settings: list[str], tmp_path: Path
) -> None:
    ids = np.random.default_rng(0).integers(1, 20, (40, 6))
    ids[:, 4:] = 0
    given = (ids, np.arange(40) % CLASSES) if network is Padded else images(8)
    assert run(network, tmp_path / "run", data=given, methods=[method], settings=settings).trials[0].finished


def test_a_last_layer_in_a_container_of_two_names_is_exported_by_both(tmp_path: Path) -> None:
    class TwoNames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.classifier = nn.Linear(8, 8), nn.Sequential(nn.Dropout(0.1), nn.Linear(8, CLASSES))
            self.head = self.classifier

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(torch.relu(self.body(x)))
            return logits

    trained = run(TwoNames, tmp_path / "run")
    folder = fedkeep.export_model(trained, tmp_path / "exported", onnx=False)
    network, inputs = TwoNames(), torch.ones(2, 8)
    network.load_state_dict(load_file(folder / "model.safetensors"))
    assert torch.allclose(network.eval()(inputs), trained["FedAvg", 0].model().eval()(inputs))
    again = run(TwoNames, tmp_path / "again", weights=str(folder / "model.safetensors"))
    assert again.trials[0].finished


def test_a_class_that_takes_other_numbers_is_told_what_it_was_given(tmp_path: Path) -> None:
    class Cnn(nn.Module):
        def __init__(self, in_channels: int, num_classes: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(in_channels, 4, 3)

    with pytest.raises(ConfigError, match=r"builds no network for inputs of shape \(1, 8, 8\) and 4 classes: "):
        run(Cnn, tmp_path / "run", data=images(8))

    def mistaken(size: Any, rows: int) -> nn.Module:
        return nn.Linear(8, {"width": 8}["widht"])

    with pytest.raises(KeyError):
        run(mistaken, tmp_path / "run")


def test_whose_trial_it_was_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="features are needed here") as caught:
        run(Scaled, tmp_path / "run", methods=["fedavg", "moon"])
    assert "It is of the trial of MOON with seed 0." in caught.value.__notes__


class Stopped(fedkeep.Callback):
    def on_round_end(self, state: Any, result: Any) -> None:
        raise RuntimeError


def test_a_run_does_not_go_on_with_other_networks_of_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from torch import nn\ndef small(shape, classes):\n    return nn.Sequential(nn.Linear(8, 4), {})"
    (tmp_path / "others_of_clients.py").write_text(code.format("nn.Linear(4, 4)"))
    monkeypatch.syspath_prepend(tmp_path)
    x, y, *_ = rows()
    np.savez(tmp_path / "own.npz", x=x, y=y)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[data]\nname = "{tmp_path / "own.npz"}"\n[partition]\nscheme = "iid"\nnum_clients = 2\n'
        "[run]\nrounds = 2\ncohort_size = 2\n"
        '[model]\nname = "mlp"\n[[client_models]]\nclients = ["0"]\nname = "others_of_clients:small"\n'
        f'[public]\nname = "{tmp_path / "own.npz"}"\n[[methods]]\nalgorithm = "ft-kd"\n'
    )
    machine = fedkeep.Machine(allow_code=True)
    with pytest.raises(Exception, match="Stopped"):
        fedkeep.run(recipe, out=tmp_path / "run", seeds=[0], machine=machine, callbacks=[Stopped()])
    assert (tmp_path / "run" / "code" / "others_of_clients.py").is_file()
    assert read_run(tmp_path / "run").info["client_networks"][0]["digest"]
    (tmp_path / "others_of_clients.py").write_text(code.format("nn.Linear(4, 4, bias=False)"))
    sys.modules.pop("others_of_clients")
    with pytest.raises(RunError, match="another network than others_of_clients:small"):
        fedkeep.resume(tmp_path / "run", machine=machine)


class Careless(fedkeep.Callback):
    """Leaves settings of PyTorch changed that the next round would compute with."""

    def on_round_end(self, state: Any, result: Any) -> None:
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(3)

    def on_trial_end(self, state: Any) -> None:
        self.on_round_end(state, None)


def test_what_a_callback_leaves_set_is_not_for_the_next_round(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    plain, changed = (
        run("mlp", tmp_path / name, rounds=3, callbacks=callbacks)
        for name, callbacks in (("plain", []), ("changed", [Careless()]))
    )
    assert plain.trials[0].rounds == changed.trials[0].rounds
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == threads


def test_predicting_from_memory_is_told_what_to_use(tmp_path: Path) -> None:
    folder = fedkeep.export_model(run("mlp", tmp_path / "run"), tmp_path / "exported", onnx=False)
    with pytest.raises(ConfigError, match=r"predict reads files, not a ndarray\. .* fedkeep\.load_model\(folder\)"):
        next(fedkeep.predict(folder, rows()[0]))
    (tmp_path / "x.csv").write_text("age,bmi\n1.0,2.0\n")
    with pytest.raises(DataError, match="A model that was trained on"):
        next(fedkeep.predict(folder, tmp_path / "x.csv"))
