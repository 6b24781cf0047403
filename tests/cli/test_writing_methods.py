"""What a method's author is told before anything runs, the file that is written for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from fedkeep._utils.type_hints import annotations_of
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.cli import main
from fedkeep.errors import ConfigError
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.recipe import Method
from fedkeep.interface import Algorithm, Client, Cohort, Fit, algorithms, get_algorithm, on_client
from fedkeep.interface.method_checks import check_method
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights
from fedkeep.options import build, option, unwritable
from fedkeep.testing import checks_for

AS_WRITTEN = '''@dataclass(frozen=True)
class Draft(Algorithm):
    """Federated averaging that keeps a part of the former model; change it."""

    title = "Draft"
    paper = "yours"

    inertia: float = option(0.0, "weight of the former model in the new one", low=0.0, high=0.99)
'''
WITH_INIT = '''class Draft(Algorithm):
    """Federated averaging."""

    title = "Draft"

    def __init__(self):
        self.inertia = 0.0
'''
PARALLEL = {  # what is written wrong in the method of `fedkeep new-method Draft`: what for what, and the message
    "no round": ("def round(", "def ruond(", " does not define round. Is 'ruond' meant to be it?"),
    "no annotation of the result": ("Weights) -> Fit", "Weights)", ".train has no type annotation of its result."),
    "no annotation of an argument": (
        "model: Weights)",
        "model)",
        ".train has no type annotation of its argument model.",
    ),
    "an unknown annotation": ("Weights) -> Fit", "Weights) -> Fti", ".train: a type annotation names 'Fti', which"),
    "an annotation without content": ("Weights) -> Fit", "Weights) -> dict", "annotation of its result contains dict,"),
    "no step": ("    @on_client\n", "", "asks nothing of clients: mark what clients do with @on_client"),
    "no dataclass": ("@dataclass(frozen=True)\n", "", "Draft has options and is no dataclass: write @dataclass("),
    "a field that is no option": (
        'inertia: float = option(0.0, "weight of the former model in the new one", low=0.0, high=0.99)',
        "inertia: float = 0.0",
        "Draft.inertia is no option, so that recipes, records and a resumed run would lose it. Write: inertia: float",
    ),
    "an option named like a key of recipes": (
        "inertia: float = option(0.0",
        'algorithm: str = option("fedavg", "which"); inertia: float = option(0.0',
        "Draft.algorithm cannot be an option: the rows of recipes have a 'algorithm'. Rename it.",
    ),
    "an option named like a function": (
        "inertia: float = option(0.0",
        'check: bool = option(True, "if"); inertia: float = option(0.0',
        "Draft.check cannot be an option: methods have a 'check'. Rename it.",
    ),
    "an option that is one for all": ("float = option(0.0", "list[float] = option([0.0]", "Give a tuple, (0.0,)."),
    "needs that are a text": ('title = "Draft"', 'title = "Draft"; needs = "images"', "needs is a tuple, such as"),
    "scores of another shape": (
        "    def round(",
        "    def predict(self, server, model, images):\n        return images.float().flatten(1)\n\n    def round(",
        "Draft.predict returned a torch.float32 tensor of shape [",
    ),
    "scores that are no numbers": (
        "    def round(",
        "    def predict(self, server, model, images):\n"
        "        return server.predict(model, {'input': images}).log()\n\n    def round(",
        "Draft.predict returned scores that are not a number, after round 1.",
    ),
    "an array for a model": (
        "self.train, server.model)",
        "self.train, {n: t.numpy() for n, t in server.model.items()})",
        "model of Draft.train",
    ),
    "an __init__ of its own": (AS_WRITTEN, WITH_INIT, " has an __init__ of its own. Write its options as fields, such"),
    "a state that is not named": (
        "replies = ",
        "server.state.seen = ",
        "state has no field 'seen', since the method names",
    ),
}
SEQUENTIAL = {  # the same with --sequential
    "no type argument": ("(Algorithm[DraftState])", "(Algorithm)", "write class Draft(Algorithm[DraftState])."),
    "None for a state": (
        "(Algorithm[DraftState])",
        "(Algorithm[None, DraftState])",
        "server keeps nothing, it says.",
    ),
    "no second argument": ("client: Client,", "client: Client[DraftState],", "(Algorithm[DraftState, DraftState])."),
    "no default": (" = field(default_factory=dict)", "", "DraftState, the server's state, has no default for mean"),
    "a field that is not given": (
        "(default_factory=dict)",
        "(init=False)",
        "has field(init=False) for mean: a state is",
    ),
    "a state without dataclass": ("@dataclass\n", "", "DraftState, the server's state, is no dataclass, so that"),
    "a frozen state": ("@dataclass\n", "@dataclass(frozen=True)\n", "DraftState, the server's state, is frozen, and"),
    "a field without content": ("mean: Weights", "mean: dict", "keeps mean, whose annotation contains dict: that says"),
    "a field that is not declared": (
        "state.mean = ",
        "state.men = ",
        "keeps men in server.state, which DraftState has",
    ),
    "another state": ("eval_model = server.state.mean", "state = server.model", "server.state is a dict after Draft."),
    "None in the state": (
        "eval_model = server.state.mean",
        "state.mean = None",
        "server.state.mean is None, not Weights",
    ),
    "None as the model": ("eval_model = server.state.mean", "model = None", "server.model after Draft.round is None"),
    "a model of another type": (
        "eval_model = server.state.mean",
        "model = {name: weight.double() for name, weight in server.model.items()}",
        "server.model after Draft.round is not of the form that the model had before: 'body.full1.weight' is float64",
    ),
    "a model of other names": (
        "eval_model = server.state.mean",
        "model = {'x' + name: weight for name, weight in server.model.items()}",
        "of the form that the model had before: it lacks 'body.full1.weight'",
    ),
    "no numbers": (
        "eval_model = server.state.mean",
        "model = {name: weight * float('nan') for name, weight in server.model.items()}",
        "left numbers that are not finite in server.model: in 'body.full1.weight'.",
    ),
    "averages of another type": (
        "eval_model = server.state.mean",
        "eval_model = {name: weight.double() for name, weight in server.model.items()}",
        "server.eval_model after Draft.round is not of the form that the model had before: 'body.full1.weight' is",
    ),
    "a reply as the model": (
        "eval_model = server.state.mean",
        "model = fit",
        "server.model after Draft.round is a Fit",
    ),
    "a model that counts, unsaid": (
        "        return True\n",
        "        return False\n",
        "assigns server.eval_model, but Draft.sets_eval_model is False",
    ),
    "no return": ("return client.fit", "client.fit", "what Draft.train returned is None, not Fit. Return what"),
    "nothing to train": ("self.train, server.model", "self.train, None", "model of Draft.train is None, not Weights"),
    "too much": ("self.train, server.model", "self.train, server.model, 3", "After the client it takes model."),
    "training of None": ("client.fit(model", "client.fit(None", "the model that fit is given is None where weights"),
    "what was sent, in place": (
        "return client.fit(model",
        "[tensor.mul_(0.9) for tensor in model.values()]; return client.fit(model",
        "step 'train' changed argument[0].body.full1.weight in place.",
    ),
    "a loss of PyTorch": ("CrossEntropy()", "torch.nn.CrossEntropyLoss()", "not a CrossEntropyLoss."),
    "the class of a loss": ("CrossEntropy()", "CrossEntropy() + Ours", "not the class Ours itself: call it, Ours("),
    "a vector": ("CrossEntropy()", "CrossEntropy() + Ours(0)", "loss Ours must return a scalar tensor, such as"),
    "a number": ("CrossEntropy()", "CrossEntropy() + Ours(1)", "and returned a float, which has no gradient."),
    "integers": ("CrossEntropy()", "CrossEntropy() + Ours(2)", "a tensor of shape [] and type int64."),
    "images for a batch": ("CrossEntropy()", "Ours(4)", "logits takes a batch, such as batches[0], not a Tensor."),
    "no gradient": ("CrossEntropy()", "Ours(3)", "the loss Ours does not depend on the weights that are trained."),
}
MISTAKES = [(mistake, name, False) for name, mistake in PARALLEL.items()]
MISTAKES += [(mistake, name, True) for name, mistake in SEQUENTIAL.items()]
OURS = """
import torch
from fedkeep.losses import Loss

@dataclass(frozen=True)
class Ours(Loss):
    wrong: int
    def __call__(self, model, batches):
        value = model.logits(batches[0].data["input"] if self.wrong == 4 else batches[0]).square()
        return (value.mean(1), value.mean().item(), value.argmax(), value.mean().detach())[self.wrong]

"""
HEIR = """
from dataclasses import dataclass
from fedkeep.algorithms.sequential.sfedkd import SFedKD

@dataclass(frozen=True)
class Heir(SFedKD):
    '''Inherits all, the title too.'''
"""
HEIR_MESSAGE = "Heir are both named 'sfedkd'. Give yours another title."
RUN = """
import sys
from fedkeep.cli import main
for file in sys.argv[2:]:
    method = file.rpartition("/")[2].removesuffix(".py")
    words = ["--use", file, "--methods", method, "--rounds", "1", "--workers", "1", "--quiet", "--out", file + ".run"]
    assert main(["run", sys.argv[1], *words]) == 1
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What is printed for each mistake, and for a method with the name of another one."""
    folder = tmp_path_factory.mktemp("mistakes")
    assert main(["new-method", "Draft", "--out", str(folder)]) == 0
    parallel = (folder / "draft.py").read_text()
    assert main(["new-method", "Draft", "--sequential", "--out", str(folder / "sequential")]) == 0
    sequential = (folder / "sequential" / "draft.py").read_text()
    sequential = sequential.replace("\n@dataclass\n", OURS + "\n@dataclass\n")
    files = []
    for number, ((old, new, _), _, is_sequential) in enumerate(MISTAKES):
        text = sequential if is_sequential else parallel
        assert old in text
        files.append(folder / f"draft{number}.py")
        files[-1].write_text(text.replace(old, new).replace("Draft", f"Draft{number}"))
    files.append(folder / "heir.py")  # the last: its class stays, and so does the clash
    files[-1].write_text(HEIR)
    # Another process: a class that was once defined stays.
    words = [sys.executable, "-c", RUN, tiny.write_recipe(folder), *map(str, files)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = done.stderr.splitlines()
    assert len(found) == len(files), done.stderr
    return found


@pytest.mark.parametrize("number", [pytest.param(n, id=name) for n, (_, name, _) in enumerate(MISTAKES)])
def test_a_mistake_is_named(number: int, errors: list[str]) -> None:
    (_, _, message), _, _ = MISTAKES[number]
    assert message in errors[number].replace(f"Draft{number}", "Draft")


def test_no_method_has_the_name_of_a_section_or_of_another_file(tmp_path: Path) -> None:
    class Attack(FedAvg):
        title = "Attack"

    with pytest.raises(ConfigError, match="cannot be called 'attack', like a section of recipes"):
        Method(label="", algorithm=Attack())
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").touch()
    with pytest.raises(ConfigError, match=r"one/mine\.py and .*other/mine\.py have one name"):
        import_user_code([str(tmp_path / "one" / "mine.py"), str(tmp_path / "other" / "mine.py")])


def test_a_name_that_is_taken_is_named(errors: list[str]) -> None:
    assert HEIR_MESSAGE in errors[-1]


@pytest.mark.parametrize("hint", [list[float], Sequence[float], dict[str, float], Path, tuple[()], tuple[Path, ...]])
def test_an_option_that_cannot_stand_in_a_recipe_is_named(hint: Any) -> None:
    fields, more = [("w", hint, option(None, "weights"))], {"title": "Odd"}
    odd = make_dataclass("Odd", fields, bases=(FedAvg,), namespace=more, frozen=True)
    with pytest.raises(ConfigError, match=r"Odd: the option w: .* cannot stand in a recipe\. Write tuple\[float, "):
        check_method(odd)


@pytest.mark.parametrize(
    ("hint", "value"),
    [(list, [1, 2]), (list | None, [1]), (Mapping, {"a": 1}), (object, "x"), (date, date(2026, 1, 2)), (int | list, 3)],
)
def test_an_option_of_any_type_that_is_read_from_a_recipe_is_taken(hint: Any, value: Any) -> None:
    fields, more = [("w", hint, option(None, "weights"))], {"title": "Read"}
    cls = make_dataclass("Read", fields, bases=(FedAvg,), namespace=more, frozen=True)
    check_method(cls)
    assert build(cls, {"w": value}).w == value


def test_the_options_of_all_methods_can_stand_in_a_recipe() -> None:
    own = [cls for cls in algorithms().values() if cls.__module__.startswith("fedkeep.")]
    assert not [problem for cls in own for problem in unwritable(cls, annotations_of(cls))]


SHARED = """
from collections.abc import Mapping
from dataclasses import dataclass
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.models import Weights
from fedkeep.options import option

class Shared(Algorithm):
    def round(self, server: Server, cohort: Cohort) -> None:
        pass

@dataclass(frozen=True)
class WithTable(Shared):
    rates: Mapping[str, float] = option(dict, "by client")

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        pass
"""


def test_what_methods_have_in_common_has_no_steps_and_a_table_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "with_table.py"
    path.write_text(SHARED)
    assert main(["methods", "withtable", "--use", str(path)]) == 0
    assert "rates {} a table by client" in " ".join(capsys.readouterr().out.split())


def test_a_method_does_not_hide_a_module_of_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-method", "Queue", "--out", str(tmp_path)]) == 1
    assert "queue.py would stand in the way of Python's own module 'queue'" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_what_round_is_annotated_with_need_not_be_known() -> None:
    class Hinted(Algorithm):
        def round(self, server: OnlyForTypeCheckers, cohort: Cohort) -> None:  # type: ignore[name-defined]  # noqa: F821
            """Nothing of it travels."""

        @on_client
        def train(self, client: Client, model: Weights) -> Fit:
            return client.fit(model, CrossEntropy())

    check_method(Hinted)


def test_a_written_method_and_its_test_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-method", "MyFirstDraft", "--out", str(tmp_path)]) == 0
    assert f"fedkeep run --use {tmp_path}/my_first_draft.py --methods fedavg,myfirstdraft" in capsys.readouterr().out
    import_user_code([str(tmp_path / "my_first_draft.py")])
    for name, check in checks_for(get_algorithm("myfirstdraft")):
        if name in ("two_runs_are_equal", "resume", "lost_clients"):
            check()
    compile((tmp_path / "test_my_first_draft.py").read_text(), "test", "exec")
    assert main(["new-method", "MyFirstDraft", "--out", str(tmp_path)]) == 1, "nothing is overwritten"
    for name in ("sfedkd", "SFedKD", "class"):
        assert main(["new-method", name, "--out", str(tmp_path)]) == 1


def test_a_written_sequential_method_keeps_a_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-method", "RunningMean", "--sequential", "--out", str(tmp_path)]) == 0
    assert "--methods fedseq,runningmean" in capsys.readouterr().out
    import_user_code([str(tmp_path / "running_mean.py")])
    cls = get_algorithm("runningmean")
    for name, check in checks_for(cls):
        if name in ("two_runs_are_equal", "resume", "lost_clients"):
            check()
    reference, ours = tiny.simulation(get_algorithm("fedseq")()), tiny.simulation(cls())
    models = []
    for _ in range(2):
        reference.run_round()
        ours.run_round()
        models.append(reference.server.model)
        assert tiny.equal(ours.server.model, models[-1]), "it trains as FedSeq does"
    for name, tensor in ours.server.eval_model.items():
        torch.testing.assert_close(tensor, (models[0][name] + models[1][name]) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--sequential"]], ids=["parallel", "sequential"])
def test_all_of_the_written_test_passes(words: list[str], tmp_path: Path) -> None:
    assert main(["new-method", "WholeDraft", "--out", str(tmp_path), *words]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_whole_draft.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
