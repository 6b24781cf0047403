"""A run on data of one's own: other data are never taken for the same, and the run goes on from anywhere."""

from __future__ import annotations

import inspect
import linecache
import logging
import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from enum import Enum
from functools import cache, cached_property, partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, relu

import fedkeep
from fedkeep._utils.digests import ForeignFile
from fedkeep.cli.main import main
from fedkeep.errors import RunError
from fedkeep.experiment import plugins
from fedkeep.experiment.run import _new_folder
from fedkeep.models import own_code
from fedkeep.models.custom import custom, describe_network
from fedkeep.reporting.run_folder import read_run
from fedkeep.reporting.summary import differences, summary

SGD = fedkeep.SGD(lr=0.5, batch_size=8)


def examples(seed: int, spread: float = 0.1) -> dict[str, Any]:
    """Return two classes around -1 and 1, and who holds each of them."""
    rng = np.random.default_rng(seed)
    y = np.arange(48) % 2
    x = (2 * y - 1)[:, None] + spread * rng.standard_normal((48, 3))
    return {"x": x.astype(np.float32), "y": y, "client": np.arange(48) % 3}


def run(data: Any, tmp_path: Path, name: str, **changes: Any) -> fedkeep.RunResult:
    given: dict[str, Any] = {"partition": fedkeep.IID(num_clients=3), "seeds": [0], "rounds": 2, "methods": ["fedavg"]}
    given |= {"model": "mlp", "training": SGD}
    return fedkeep.run(data=data, out=tmp_path / name, **(given | changes))


def arrays(seed: int) -> tuple[Any, Any]:
    found = examples(seed)
    return found["x"], found["y"]


def test_runs_on_different_arrays_are_no_seeds_of_one_method(tmp_path: Path) -> None:
    run(arrays(0), tmp_path, "one")
    run(arrays(1), tmp_path, "other", seeds=[1])
    run(arrays(0), tmp_path, "again", seeds=[1])
    one, other, again = (read_run(tmp_path / name) for name in ("one", "other", "again"))
    assert [row.label.partition(" ")[0] for row in summary([one, other]) if "," not in row.label] == [
        "FedAvg",
        "FedAvg",
    ]
    assert [len(row.trials) for row in summary([one, again])] == [2, 2]


def test_methods_on_different_arrays_are_not_compared(tmp_path: Path) -> None:
    run(arrays(0), tmp_path, "one")
    run(arrays(1), tmp_path, "other", methods=["fedprox"])
    rows = summary([read_run(tmp_path / "one"), read_run(tmp_path / "other")])
    found = {one.label: one.reason for one in differences(rows, "FedAvg")}
    assert found["FedProx"] == "not comparable: other data"


class Focal(nn.Module):
    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1).gather(1, labels[:, None])
        return -((1 - log_p.exp()) ** self.gamma * log_p).mean()


def test_runs_with_different_losses_are_no_seeds_of_one_method(tmp_path: Path) -> None:
    for name, gamma, seed in (("one", 0.0, 0), ("other", 9.0, 1), ("again", 0.0, 1)):
        run(arrays(0), tmp_path, name, loss=Focal(gamma), seeds=[seed], rounds=1)
    one, other, again = (read_run(tmp_path / name) for name in ("one", "other", "again"))
    assert all("loss=" in row.label for row in summary([one, other]))
    assert "(" not in summary([one, again])[0].label


def scaled(scale: float) -> Any:
    return lambda logits, labels: scale * cross_entropy(logits, labels)


@pytest.mark.parametrize(
    ("loss", "other"),
    [
        (scaled(1.0), scaled(2.0)),
        (Focal(1.0), Focal(2.0)),
        (partial(cross_entropy, label_smoothing=0.1), partial(cross_entropy, label_smoothing=0.2)),
        (nn.CrossEntropyLoss(torch.ones(2)), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]))),
    ],
    ids=["closure", "attribute", "partial", "buffer"],
)
def test_a_run_does_not_go_on_with_another_loss(loss: Any, other: Any, tmp_path: Path) -> None:
    run(arrays(0), tmp_path, "run", loss=loss, rounds=1)
    assert fedkeep.resume(tmp_path / "run", loss=deepcopy(loss)).trials
    with pytest.raises(RunError, match=r"was begun with another loss \(given\..*Restore the former code"):
        fedkeep.resume(tmp_path / "run", loss=other)


class Counting(nn.Module):
    """A loss that remembers: its warm-up is of its first calls, and a buffer follows its values."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.projection = nn.Linear(2, 2)  # with numbers of its own in each instance
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        loss = cross_entropy(logits, labels) * min(1.0, self.calls / 10)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss


class Closed:
    """A loss that nobody may look into, as compiled ones."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels)

    def __getstate__(self) -> Any:
        raise TypeError("cannot be looked into")

    def __len__(self) -> int:
        raise TypeError("has no truth value")


@pytest.mark.parametrize("loss", [Counting(), Counting, Closed()], ids=["object", "class", "closed"])
def test_what_training_changes_in_a_loss_makes_it_no_other(loss: Any, tmp_path: Path) -> None:
    run(arrays(0), tmp_path, "run", loss=loss, rounds=1)
    assert fedkeep.resume(tmp_path / "run", loss=loss).trials


class Rate:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


def test_numbers_in_arrays_and_objects_of_a_loss_count() -> None:
    def digest(numbers: Any) -> str:
        plugins.keep_loss(given := partial(cross_entropy, label_smoothing=numbers))
        return plugins.describe_loss(f"given.{type(given).__name__}")

    many = np.zeros(3000)
    changed = many.copy()
    changed[1500] = 1
    digests = [digest(numbers) for numbers in (many, changed, Rate(0.1), Rate(0.2), Rate(0.2))]
    assert len(set(digests)) == 4
    assert digests[-1] == digests[-2]
    address = "<at.Cfg object at 0x000001E5A5A5F0D0>"  # as Windows writes it
    assert own_code.ADDRESS.sub("", address) == "<at.Cfg object>"


def test_a_run_does_not_go_on_with_another_method_of_the_program_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfTheProgram(fedkeep.FedAvg):
        """A method that no file but the program's has."""

    OfTheProgram.__module__ = "__main__"
    monkeypatch.setattr(own_code, "source_text", lambda value: "as_it_was")
    run(arrays(0), tmp_path, "run", methods=[OfTheProgram()], rounds=1)
    assert fedkeep.resume(tmp_path / "run").trials
    monkeypatch.setattr(own_code, "source_text", lambda value: "edited")
    with pytest.raises(RunError, match=r"was begun with another method \(oftheprogram\)"):
        fedkeep.resume(tmp_path / "run")


WEIGHT = 1.0
PRIOR: Any = torch.ones(2)
OPTIONS = {"kinds": (frozenset({"conv", "linear", "norm"}), 3), "scale": [1.0]}
CRITERION = nn.CrossEntropyLoss()
CONFIG = SimpleNamespace(scale=1.0)
STEP: Any = np.float64(1.0)
KINDS = {cross_entropy, nn.functional.relu}
CALLS = 0
LOG: dict[str, list[float]] = {"lengths": []}
MEAN = torch.zeros(1)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    count()
    LOG["lengths"].append(float(len(__name__)))
    MEAN.data.mul_(0.9)
    numbers = WEIGHT * CONFIG.scale * STEP * cached(1.0) * (PRIOR.sum() if PRIOR is MEAN else 1) * len(KINDS)
    return numbers * helper(logits, labels) * OPTIONS["scale"][0] + CRITERION(logits, labels) * min(CALLS, 0)


def count() -> None:
    global CALLS
    CALLS += 1


def helper(logits: Tensor, labels: Tensor) -> Tensor:
    """As it is."""
    return cross_entropy(logits, labels, torch.as_tensor(PRIOR, dtype=torch.float32))


@cache
def cached(number: float) -> float:
    """As it is."""
    return number * made(number)


def maker(factor: float) -> Any:
    return lambda number: number * factor


made = maker(1.0)


def edited(name: str, old: str, new: str) -> Any:
    """Return a helper of this module as it is after an edit of its file."""
    source = inspect.getsource(inspect.unwrap(globals()[name])).replace(old, new)
    file = f"edited {name} {new}"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space = dict(globals())
    exec(compile(source, file, "exec"), space)  # noqa: S102  # this file's own text
    return space[name]


class Helped(nn.Linear):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(2, 2)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + weighted(x, x)


def digests(*, loss: Any = weighted, network: Any = lambda: Helped()) -> tuple[str, str]:
    plugins.keep_loss(given := partial(loss))
    digest = describe_network(custom(network), (2,), 2)["digest"]
    return plugins.describe_loss(f"given.{type(given).__name__}"), digest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WEIGHT", 2.0),
        ("PRIOR", torch.zeros(2)),
        ("PRIOR", np.zeros(2)),
        ("OPTIONS", {**OPTIONS, "scale": [2.0]}),
        ("CRITERION", nn.CrossEntropyLoss(label_smoothing=0.5)),
        ("CONFIG", SimpleNamespace(scale=2.0)),
        ("STEP", np.float64(2.0)),
        ("KINDS", {cross_entropy}),
        ("made", maker(2.0)),
    ],
)
def test_what_a_loss_or_a_network_reads_in_its_module_counts(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digests()
    for unread in ("x", "logits", "__name__"):  # arguments, and what is another in worker processes
        monkeypatch.setitem(globals(), unread, "another")
    assert digests() == before, "nor what the code itself changes, which is another after a while"
    monkeypatch.setitem(globals(), name, value)
    assert not set(digests()) & set(before)


@pytest.mark.parametrize(
    ("name", "old", "new"), [("helper", "dtype=torch.float32", "dtype=None"), ("cached", "* ", "+ ")]
)
def test_an_edited_helper_counts_and_an_edited_docstring_does_not(
    name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digests()
    monkeypatch.setitem(globals(), name, edited(name, "As it is.", "As it was."))
    assert digests() == before
    monkeypatch.setitem(globals(), name, edited(name, old, new))
    assert not set(digests()) & set(before)


def test_what_code_changes_itself_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digests()
    for name, value in {"LOG": {"lengths": [1.0]}, "MEAN": torch.ones(1), "CALLS": 9}.items():
        monkeypatch.setitem(globals(), name, value)
    assert digests() == before


def scaled_network(WEIGHT: float) -> Any:  # the name of a global
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * WEIGHT

    return lambda: Scaled(2, 2)


def test_variables_around_a_class_count_and_globals_of_their_names_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digests(network=scaled_network(1.0))[1]
    assert digests(network=scaled_network(2.0))[1] != before
    monkeypatch.setitem(globals(), "WEIGHT", 3.0)
    assert digests(network=scaled_network(1.0))[1] == before


Item = TypeVar("Item")


class Branch(nn.Linear, Generic[Item]):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + len(REGISTRY)


class Leaf(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - len(REGISTRY)


REGISTRY = {"branch": Branch, "leaf": Leaf}


class Kind(Enum):
    PLAIN = 1


def logged(kind: Kind = Kind.PLAIN) -> Any:
    logger = logging.getLogger("of this test")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        logger.debug(kind)
        return cross_entropy(logits, labels)

    return loss


def scripted(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels)


def scripted_twice(logits: Tensor, labels: Tensor) -> Tensor:
    return 2.0 * cross_entropy(logits, labels)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript
def test_descriptions_are_short_and_the_same_whatever_libraries_do() -> None:
    """Of a library's objects there are names only: their insides are endless, and other ones in each process."""
    network = repr(own_code.describe(nn.Sequential(Branch(2, 2), Leaf(2, 2))))
    assert network.count("class Branch") == network.count("class Leaf") == 1
    before = repr(own_code.describe(logged()))
    logging.getLogger("of this test").setLevel(logging.ERROR)
    assert repr(own_code.describe(logged())) == before
    assert max(len(network), len(before)) < 3000
    compiled = repr(own_code.describe(torch.compile(scripted)))
    assert "return cross_entropy(logits, labels)" in compiled
    assert len(compiled) < 3000
    one, other = (repr(own_code.describe(torch.jit.script(each))) for each in (scripted, scripted_twice))
    assert one != other


ADJACENCY = torch.eye(2).to_sparse()
FACTOR = 1.0


class OverGraph(nn.Linear):
    first = FACTOR

    @cached_property
    def factor(self) -> float:
        return FACTOR

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((ADJACENCY @ x.T).T) * self.factor


def test_sparse_tensors_cached_properties_and_attributes_of_classes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digests(network=lambda: OverGraph(2, 2))[1]
    for name, value in (("ADJACENCY", 2 * ADJACENCY), ("FACTOR", 2.0)):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), name, value)
            assert digests(network=lambda: OverGraph(2, 2))[1] != before, name
    monkeypatch.setattr(OverGraph, "first", 2.0)
    assert digests(network=lambda: OverGraph(2, 2))[1] != before


def doubled(function: Any) -> Any:
    @wraps(function)
    def wrapper(*arguments: Any) -> Any:
        """As it is."""
        return 2 * function(*arguments)

    return wrapper


@doubled
def decorated(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels)


class Defaults(nn.Linear):
    def forward(self, x: Tensor, scale: float = FACTOR) -> Tensor:
        return super().forward(x) * scale


def test_decorators_defaults_and_options_of_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digests(loss=decorated, network=lambda: Defaults(2, 2))
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "doubled", edited("doubled", "2 * function", "3 * function"))
        assert digests(loss=decorated)[0] != before[0]
    monkeypatch.setattr(Defaults.forward, "__defaults__", (2.0,))
    assert digests(network=lambda: Defaults(2, 2))[1] != before[1]

    def encoder(heads: int, activation: Any = relu) -> Any:
        layer = nn.TransformerEncoderLayer(4, heads, 4, activation=activation)
        return lambda: nn.Sequential(nn.Linear(2, 4), layer, nn.Linear(4, 2))

    found = [
        describe_network(custom(encoder(*how)), (2,), 2)["digest"]
        for how in ((1,), (1,), (2,), (1, gelu), (1, torch.tanh))
    ]
    assert found[0] == found[1]
    assert len({*found}) == 4


def recording() -> Any:
    history: list[float] = []
    totals = {"calls": 0}

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        value = cross_entropy(logits, labels)
        history.append(float(value.detach()))
        totals["calls"] += 1
        return value

    return loss


CALLED: list[int] = []
NORM = nn.BatchNorm1d(2, affine=False)


class Annealed(nn.Module):
    def __init__(this, strength: float = 1.0) -> None:  # any name is possible
        super().__init__()
        this.calls, this.strength = 0, strength

    def forward(this, logits: Tensor, labels: Tensor) -> Tensor:
        this.calls += 1
        return this.strength * cross_entropy(logits, labels)


@pytest.mark.parametrize(
    "loss",
    [
        recording(),
        lambda logits, labels: (CALLED.append(1), cross_entropy(logits, labels))[1],
        lambda logits, labels: cross_entropy(NORM(logits), labels),
        Annealed(),
    ],
    ids=["closure", "lambda", "batch norm", "attribute"],
)
def test_a_run_goes_on_with_a_loss_that_has_recorded_something(loss: Any, tmp_path: Path) -> None:
    run(arrays(0), tmp_path, "run", loss=loss, rounds=1)
    assert fedkeep.resume(tmp_path / "run", loss=loss).trials
    assert own_code.describe(Annealed()) != own_code.describe(Annealed(2.0)), "which no training changes"


def test_code_without_source_counts_as_it_was_compiled() -> None:
    def typed(factor: float) -> Any:
        space: dict[str, Any] = {"nn": nn, "__name__": __name__}
        code = f"class Typed(nn.Module):\n    def forward(self, x):\n        self.n = 1\n        return {factor} * x"
        exec(code, space)  # noqa: S102  # as typed at a prompt
        return space["Typed"]

    described = [repr(own_code.describe(typed(factor)())) for factor in (1.0, 1.0, 2.0)]
    assert described[0] == described[1] != described[2]


def test_a_loss_that_was_changed_between_two_runs_is_another(tmp_path: Path) -> None:
    loss = Focal(0.0)
    run(arrays(0), tmp_path, "one", loss=loss, rounds=1)
    loss.gamma = 9.0
    run(arrays(0), tmp_path, "other", loss=loss, rounds=1, seeds=[1])
    one, other = (read_run(tmp_path / name) for name in ("one", "other"))
    assert all("loss=" in row.label for row in summary([one, other]))


def test_globals_of_lambdas_and_attributes_of_networks_count(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = lambda logits, labels: WEIGHT * cross_entropy(logits, labels)  # noqa: E731
    before = digests(loss=loss, network=lambda: Helped(3.0))
    assert digests(network=lambda: Helped(4.0))[1] != before[1]
    monkeypatch.setitem(globals(), "WEIGHT", 2.0)
    assert digests(loss=loss)[0] != before[0]


def test_the_digest_is_the_same_whatever_the_order_of_sets() -> None:
    code = "import sys; sys.path.insert(0, 'tests/experiment'); import test_own_inputs as t; print(t.digests())"
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code]
        found.add(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(found) == 1


def counting(shape: tuple[int, ...], classes: int) -> nn.Module:
    calls = 0

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x)

    return Net(shape[0], classes)


def test_code_whose_variables_are_elsewhere_counts_too() -> None:
    assert describe_network(custom(counting), (2,), 2)["digest"]


def test_runs_with_two_versions_of_a_method_are_no_seeds_of_it(tmp_path: Path) -> None:
    path, machine = tmp_path / "versioned.py", fedkeep.Machine(use=(str(tmp_path / "versioned.py"),))
    path.write_text("from fedkeep import FedAvg\nclass Versioned(FedAvg):\n    'One.'\n")
    run(arrays(0), tmp_path, "one", methods=["versioned", "fedavg"], rounds=1, machine=machine)
    path.write_text(f"{path.read_text()}# edited")
    run(arrays(0), tmp_path, "other", methods=["versioned", "fedavg"], rounds=1, machine=machine, seeds=[1])
    labels = [row.label for row in summary([read_run(tmp_path / name) for name in ("one", "other")])]
    assert [label for label in labels if "code=" in label] == [one for one in labels if one.startswith("Versioned")]
    assert "FedAvg" in labels
    one, other = (read_run(tmp_path / name) for name in ("one", "other"))
    older = replace(one, info={key: value for key, value in one.info.items() if key != "own_methods"})
    assert len(summary([older, other])) == 4, "averages too; what an older run does not tell is no difference"


def test_data_that_changed_are_noticed_before_another_seed_is_trained(tmp_path: Path) -> None:
    class Halt(fedkeep.Callback):
        def on_trial_begin(self, state: Any) -> None:
            if state.settings.seed == 1:
                raise KeyboardInterrupt

    file = tmp_path / "t.csv"
    rows = [f"{n},{n % 7},{n % 2}" for n in range(60)]
    file.write_text("\n".join(["a,b,label", *rows]))
    with pytest.raises(KeyboardInterrupt):
        run(str(file), tmp_path, "run", seeds=[0, 1], callbacks=[Halt()])
    file.write_text("\n".join(["a,b,label", "5,5,1", *rows[1:]]))
    with pytest.raises(ForeignFile, match="fedavg-seed0 was run with another data set than there is now"):
        fedkeep.resume(tmp_path / "run")
    file.write_text("\n".join(["a,b,label", *rows]))
    assert len(fedkeep.resume(tmp_path / "run").trials) >= 2


def begun(tmp_path: Path, data: str | Path) -> Path:
    """Return a run that was begun on a file, and stopped after its first round."""
    out = tmp_path / "run"
    run(data, tmp_path, "run", partition="client", rounds=3)
    (out / "trials" / "fedavg-seed0" / "result.json").unlink()
    return out


@pytest.mark.parametrize("what", ["x", "client"])
def test_a_run_does_not_go_on_with_other_inputs_or_clients(tmp_path: Path, what: str) -> None:
    data, file = examples(0), tmp_path / "own.npz"
    np.savez(file, **data)
    out = begun(tmp_path, file)
    data[what] = data[what][::-1].copy()
    np.savez(file, **data)
    with pytest.raises(RunError, match="was begun with another data set than there is now"):
        fedkeep.resume(out)


def test_a_run_goes_on_from_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "mine").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    np.savez(tmp_path / "here" / "mine" / "own.npz", **examples(0))
    monkeypatch.chdir(tmp_path / "here")
    out = begun(tmp_path, "mine/own.npz")
    monkeypatch.chdir(tmp_path / "there")
    assert fedkeep.resume(out).trials[0].finished
    (out / "trials" / "fedavg-seed0" / "result.json").unlink()
    os.rename(tmp_path / "here" / "mine", tmp_path / "here" / "moved")
    with pytest.raises(RunError, match="which is not there any more"):
        fedkeep.resume(out)
    os.rename(tmp_path / "here" / "moved", tmp_path / "there" / "mine")
    assert fedkeep.resume(out).trials[0].finished, "moved with its relative path"


def test_a_run_finds_its_public_set_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    held = examples(0)
    np.savez(tmp_path / "here" / "shared.npz", x=held["x"], y=held["y"])
    monkeypatch.chdir(tmp_path / "here")
    out = tmp_path / "run"
    run(
        arrays(1),
        tmp_path,
        "run",
        methods=["fedmd"],
        settings=["public.name=shared.npz"],
        training=fedkeep.SGD(lr=0.01),
    )
    monkeypatch.chdir(tmp_path / "there")
    (out / "trials" / "fedmd-seed0" / "result.json").unlink()
    assert fedkeep.resume(out).trials[0].finished
    (out / "trials" / "fedmd-seed0" / "result.json").unlink()
    os.rename(tmp_path / "here" / "shared.npz", tmp_path / "here" / "moved.npz")
    with pytest.raises(RunError, match=r"read its public set from .* which is not there any more"):
        fedkeep.resume(out)


def test_where_data_lie_is_not_handed_on(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **examples(0))
    weights = {"0.weight": torch.zeros(2, 3), "0.bias": torch.zeros(2)}
    save_file(weights, tmp_path / "begin.safetensors")
    given: dict[str, Any] = {"partition": "client", "model": nn.Sequential(nn.Linear(3, 2))}
    run(tmp_path / "own.npz", tmp_path, "run", weights=str(tmp_path / "begin.safetensors"), **given)
    out = tmp_path / "run"
    assert read_run(out).info["data_path"] == str(tmp_path / "own.npz")
    assert main(["archive", str(out), "--out", str(tmp_path / "kept")]) == 0
    (packed,) = (tmp_path / "kept").iterdir()
    assert not [name for name in read_run(packed).info if name.endswith("_path")]


def test_two_runs_that_start_in_one_second_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedkeep.experiment.run.time.strftime", lambda _: "20261125-170657")
    folders = [_new_folder("demo") for _ in range(3)]
    assert [folder.name for folder in folders] == [f"demo-20261125-170657{end}" for end in ("", "-2", "-3")]
    assert all(folder.is_dir() for folder in folders)
