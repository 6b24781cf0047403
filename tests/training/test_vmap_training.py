"""Clients trained as one stacked model against the loop: the same steps, up to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import tiny
import torch
from torch import Tensor, nn

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fedntd import FedNTD
from fedkeep.data import Augmentation
from fedkeep.errors import ConfigError, ValueRefused
from fedkeep.interface import Client, Cohort, Fit, Server, Training, on_client
from fedkeep.losses import Batch, CrossEntropy, Loss, ModelView
from fedkeep.losses.decoupled import MergedTeachers
from fedkeep.losses.distillation import CachedDistillation
from fedkeep.losses.penalties import QuadraticPenalty
from fedkeep.models import Network, Weights
from fedkeep.models.networks import EmbeddingBag, LeNet5, ResNet18
from fedkeep.options import option
from fedkeep.rounds.executor import Future
from fedkeep.rounds.messages import StepRequest
from fedkeep.testing.runs import WrappedSteps
from fedkeep.training import vmap_training as stack
from fedkeep.training.local_training import BatchStream, TrainJob, fit
from fedkeep.training.model_runner import ModelRunner
from fedkeep.training.vmap_training import ModelStack, VmapTrainer
from fedkeep.trials import autotune
from fedkeep.trials.autotune import SIZES as STACK_SIZES
from fedkeep.trials.autotune import choose_stack_size

CPU = torch.device("cpu")
SIZES = (11, 4, 12, 11, 1)


def mlp() -> nn.Module:
    return tiny.network().double()


def networks(factory: Callable[[], nn.Module] = mlp) -> ModelRunner:
    """Return networks in float64, in which a difference is a fault and not rounding."""
    return ModelRunner(lambda: factory().double(), 0, CPU)


def columns(count: int, seed: int, shape: tuple[int, ...] = tiny.SHAPE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input": torch.randn(count, *shape, generator=generator, dtype=torch.float64),
        "label": torch.randint(tiny.CLASSES, (count,), generator=generator),
    }


def source(data: dict[str, Tensor], seed: int, augmentation: Augmentation | None = None) -> BatchStream:
    order, noise = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    return BatchStream(data, lambda images: images.double() / 255, augmentation or Augmentation(), order, noise)


def group(
    of: ModelRunner,
    objective: Callable[[int, int], Loss] = lambda number, count: CrossEntropy(),
    sizes: Sequence[int] = SIZES,
    shape: tuple[int, ...] = tiny.SHAPE,
    epochs: int = 3,
) -> list[TrainJob]:
    """Return trainings of clients of these sizes, each from weights of its own."""
    result = []
    for number, count in enumerate(sizes):
        noise = torch.Generator().manual_seed(100 + number)
        model = {
            name: tensor + 0.01 * torch.randn(tensor.shape, generator=noise, dtype=torch.float64)
            for name, tensor in of.initial.items()
            if tensor.is_floating_point()
        }
        model = dict(of.initial) | model
        data = source(columns(count, number, shape), number)
        result.append(TrainJob(model, objective(number, count), [data], epochs, round=2, seed=0))
    return result


def agree(stacked: Sequence[Fit], looped: Sequence[Fit]) -> None:
    for one, other in zip(stacked, looped, strict=True):
        assert (one.num_examples, one.num_steps) == (other.num_examples, other.num_steps)
        assert one.loss == pytest.approx(other.loss, rel=1e-5)  # summed in float32
        assert one.model.keys() == other.model.keys()
        for name in one.model:
            torch.testing.assert_close(one.model[name], other.model[name], rtol=1e-9, atol=1e-12)


PLAIN = Training(epochs=3, batch_size=4, lr=0.1)
SETTINGS = {
    "plain": PLAIN,
    "momentum": replace(PLAIN, momentum=0.9),
    "weight decay": replace(PLAIN, weight_decay=0.1),
    "clipping": replace(PLAIN, max_grad_norm=0.2),
    "everything": replace(PLAIN, momentum=0.9, weight_decay=0.1, max_grad_norm=0.2, lr_decay=0.5),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_stack_takes_the_steps_of_the_loop(name: str) -> None:
    of, training = networks(), SETTINGS[name]
    stacked = ModelStack(of, training, group(of)).fit()
    agree(stacked, [fit(of, assignment, training) for assignment in group(of)])
    assert [done.num_steps for done in stacked] == [9, 3, 9, 9, 3]


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_the_cross_entropy_of_a_stack_has_the_bits_of_pytorchs(tau: float) -> None:
    of = networks()
    ours = ModelStack(of, PLAIN, group(of, lambda number, count: CrossEntropy(tau=tau), sizes=(9, 9, 9)))
    pytorchs = copy.copy(ours)
    pytorchs.loss = ours.group[0].loss
    batches = [[stream.first(4) for stream in one.streams] for one in ours.group]
    (loss, gradients), (expected, expected_gradients) = (
        one.gradients(slice(None), batches) for one in (ours, pytorchs)
    )
    assert torch.equal(loss, expected)
    assert all(torch.equal(gradients[name], expected_gradients[name]) for name in gradients)


def test_convolutions_are_stacked() -> None:
    of = networks(lambda: LeNet5().build((1, 16, 16), tiny.CLASSES))
    result = [group(of, sizes=(9, 8, 8), shape=(1, 16, 16), epochs=2) for _ in range(2)]
    agree(
        ModelStack(of, SETTINGS["everything"], result[0]).fit(),
        [fit(of, one, SETTINGS["everything"]) for one in result[1]],
    )


def test_augmented_images_and_further_data_sets_are_stacked() -> None:
    of = networks()

    def result() -> list[TrainJob]:
        both = []
        for number, count in enumerate((9, 6, 6)):
            raw = {"input": (columns(count, number)["input"] * 40 + 120).clamp(0, 255).to(torch.uint8)}
            raw["label"] = columns(count, number)["label"]
            sources = [
                source(raw, number, Augmentation(horizontal_flip=True, crop_padding=1)),
                source(columns(5, 50 + number), number),
            ]
            both.append(
                TrainJob(of.initial, CrossEntropy() + CrossEntropy(dataset_index=1), sources, 2, round=1, seed=0)
            )
        return both

    agree(ModelStack(of, PLAIN, result()).fit(), [fit(of, one, PLAIN) for one in result()])


def test_columns_of_different_lengths_and_shared_tensors() -> None:
    """A teacher's answers are a row for each example; the model that a penalty pulls towards is one for all."""
    of = networks()
    anchor = {name: tensor + 0.1 for name, tensor in of.initial.items()}

    def objective(number: int, count: int) -> Loss:
        noise = torch.Generator().manual_seed(200 + number)
        output = torch.rand(count, 2 + tiny.CLASSES + 1, generator=noise, dtype=torch.float64)
        cached_loss = CachedDistillation(
            MergedTeachers(output[:, :2], output[:, 2:-1], output[:, -1]),
            tau=2.0,
            factor=0.5,
            log_weights=output[:, -1],
        )
        return CrossEntropy() + cached_loss + QuadraticPenalty(anchor, 0.3)

    result = group(of, objective)
    agree(ModelStack(of, PLAIN, result).fit(), [fit(of, assignment, PLAIN) for assignment in group(of, objective)])


@dataclass(frozen=True, eq=False)
class Branching(Loss):
    """A loss that looks at its value, which no stack can."""

    def __call__(self, student: ModelView, batches: Sequence[Batch]) -> Tensor:
        loss = CrossEntropy()(student, batches)
        return loss if loss.item() > 0 else 2 * loss


def body(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: Network(nn.Sequential(nn.Flatten(), *copy.deepcopy(layers), nn.Linear(16, 8)), 8, tiny.CLASSES)


def frozen() -> nn.Module:
    network = body()()
    network.body[1].weight.requires_grad_(False)
    return network


@dataclass(frozen=True, eq=False)
class Scaled(Loss):
    """What a user might write: it counts how often it was made, and is scaled by what is no field."""

    created: ClassVar[list[int]] = []
    inner: Loss

    def __init__(self, inner: Loss, factor: float = 1.0) -> None:
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "factor", factor)
        self.created.append(1)

    def __call__(self, student: ModelView, batches: Sequence[Batch]) -> Tensor:
        return self.factor * self.inner(student, batches)


@pytest.mark.parametrize(
    ("factory", "objective"),
    [
        (body(nn.Dropout(0.5)), CrossEntropy()),
        (body(nn.BatchNorm1d(16)), CrossEntropy()),
        (frozen, CrossEntropy()),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, tiny.CLASSES)), CrossEntropy()),
        (mlp, Branching()),
        (mlp, Scaled(CrossEntropy(), 2.0)),
    ],
    ids=["dropout", "batch norm", "frozen weights", "a user's own", "a loss that branches", "hidden attributes"],
)
def test_what_cannot_be_stacked_is_trained_in_the_loop(factory: Callable[[], nn.Module], objective: Loss) -> None:
    of = networks(factory)
    found = VmapTrainer(of, PLAIN).fit(group(of, lambda number, count: objective))
    looped = [fit(of, one, PLAIN) for one in group(of, lambda number, count: objective)]
    for one, other in zip(found, looped, strict=True):
        assert isinstance(one, Fit)
        assert tiny.equal(one.model, other.model), "not a step may be taken, nor a number drawn, before the refusal"


def test_only_trainings_of_one_kind_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    of, sizes = networks(), []
    monkeypatch.setattr(stack, "ModelStack", lambda n, t, group: sizes.append(len(group)) or ModelStack(n, t, group))
    objectives = [
        CrossEntropy(),
        QuadraticPenalty(of.initial, 0.5) + CrossEntropy(),
        CrossEntropy(),
        QuadraticPenalty(of.initial, 0.25) + CrossEntropy(),
        QuadraticPenalty(of.initial, 0.5) + CrossEntropy(),
    ]
    result = group(of, lambda number, count: objectives[number])
    found = VmapTrainer(of, PLAIN).fit(result)
    assert sizes == [2, 2, 2, 2], "a trial of two and a stack of two, for each of the kinds that occur twice"
    agree(found, [fit(of, one, PLAIN) for one in group(of, lambda number, count: objectives[number])])


def test_a_client_without_examples_keeps_its_model() -> None:
    of = networks()
    found = VmapTrainer(of, PLAIN).fit(group(of, sizes=(4, 0, 4)))
    assert [done.num_steps for done in found] == [3, 0, 3]


def test_no_model_holds_on_to_the_others() -> None:
    of = networks()
    for done in ModelStack(of, PLAIN, group(of)).fit():
        for tensor in done.model.values():
            assert tensor.is_contiguous()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def note_submitted(simulation: Any, note: Callable[[Sequence[StepRequest]], object]) -> None:
    """Call a function with the requests of each group that is submitted."""

    class Noting(WrappedSteps):
        def submit(self, *requests: StepRequest) -> list[Future]:
            note(requests)
            return super().submit(*requests)

    simulation.executor = Noting(simulation.executor, lambda request: request.step)


def test_groups_follow_from_the_cohort() -> None:
    """About equal groups, the largest clients first, whoever drops out."""
    simulation = tiny.simulation(
        FedAvg(),
        cohort_size=6,
        stack=4,
        rounds=1,
        fault_injector=lambda round, client, step: "x" if client == "3" else None,
    )
    groups: list[list[str]] = []
    note_submitted(simulation, lambda requests: groups.append([one.client for one in requests]))
    tiny.run_rounds(simulation)
    assert groups == [["4", "2", "5"], ["1", "0"]]  # of sizes 17, 12, 10 and 9, 7; client 3 is lost


@pytest.mark.parametrize("clip", [None, 0.1])
def test_one_gradient_for_two_weights_is_not_changed_twice(clip: float | None) -> None:
    """Autograd gives the biases of a sum one tensor between them."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 8, bias=False)
            self.one, self.other = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
            self.scale = nn.Parameter(torch.tensor(1.5))  # of no dimension

        def forward(self, images: Tensor) -> Tensor:
            return self.scale * (self.layer(images.flatten(1)) + self.one + self.other)

    of = networks(lambda: Network(Twice(), 8, tiny.CLASSES))
    training = replace(PLAIN, weight_decay=0.1, max_grad_norm=clip)
    agree(ModelStack(of, training, group(of)).fit(), [fit(of, assignment, training) for assignment in group(of)])


def test_one_clients_nan_stays_its_own() -> None:
    of = networks()
    result, clean = group(of), group(of)
    result[2].streams[0].data["input"][0] = torch.nan
    for number, (one, other) in enumerate(
        zip(ModelStack(of, PLAIN, result).fit(), ModelStack(of, PLAIN, clean).fit(), strict=True)
    ):
        assert tiny.finite(one.model) == (number != 2)
        assert number == 2 or tiny.equal(one.model, other.model)


def test_a_model_of_another_form_is_refused_as_in_the_loop() -> None:
    of = networks()
    result = [replace(one, model={**one.model, "stranger": torch.zeros(1)}) for one in group(of)]
    assert all(isinstance(error, ValueRefused) for error in VmapTrainer(of, PLAIN).fit(result))


@dataclass(frozen=True, eq=False)
class Failing(CrossEntropy):
    """Fails once the trial is over."""

    def __call__(self, student: ModelView, batches: Sequence[Batch]) -> Tensor:
        if len(batches[0].index) > 2:
            raise ZeroDivisionError("in training")
        return super().__call__(student, batches)


@dataclass(frozen=True)
class Stubborn(FedAvg):
    """Fails in its training, or after it, at one client."""

    where: str = option("after", "where it fails")

    @on_client
    def train(self, client: Client[Any], model: Weights) -> Fit:
        fails = client.id == "4"
        done = client.fit(model, Failing() if fails and self.where == "in" else CrossEntropy())
        if fails:
            raise ZeroDivisionError("after training")
        return done


@pytest.mark.parametrize("where", ["in", "after"])
def test_an_error_in_a_group_says_whose_it_is(where: str) -> None:
    with pytest.raises(ZeroDivisionError, match=where) as caught:
        tiny.simulation(Stubborn(where=where), cohort_size=6, stack=3).run_round()
    assert "client 4, round 1" in caught.value.__notes__[-1]


class Forgiving(FedAvg):
    """Catches what its training raises."""

    @on_client
    def train(self, client: Client[Any], model: Weights) -> Fit:
        try:
            return client.fit(model, Failing())
        except ZeroDivisionError:
            return client.fit(model, CrossEntropy())


def test_a_step_may_catch_the_error_of_its_own_training() -> None:
    looped, stacked = tiny.simulation(Forgiving(), cohort_size=6), tiny.simulation(Forgiving(), cohort_size=6, stack=3)
    tiny.run_rounds(looped, 1)
    tiny.run_rounds(stacked, 1)
    for name, tensor in looped.server.model.items():
        torch.testing.assert_close(stacked.server.model[name], tensor, rtol=1e-4, atol=1e-6)


class Two(FedAvg):
    """Asks for something ahead of its training."""

    @on_client
    def warm(self, client: Client[Any]) -> None:
        client.predict(client.initial_model)

    def round(self, server: Server[Any], cohort: Cohort) -> None:
        cohort.start(self.warm)
        super().round(server, cohort)


def test_calls_that_wait_change_no_group() -> None:
    simulation = tiny.simulation(Two(), cohort_size=6, stack=3, rounds=1)
    groups: list[tuple[str, int]] = []
    note_submitted(simulation, lambda requests: groups.append((requests[0].step.__name__, len(requests))))
    simulation.executor.prefetch = 4  # as if workers were idle
    tiny.run_rounds(simulation)
    assert groups == [("warm", 3), ("warm", 3), ("train", 3), ("train", 3)]


class OneFirst(Two):
    """Waits for one client before it asks all."""

    @on_client
    def practise(self, client: Client[Any], model: Weights) -> None:
        client.fit(model, CrossEntropy())

    def round(self, server: Server[Any], cohort: Cohort) -> None:
        cohort.start(self.practise, server.model)
        next(iter(cohort)).ask(self.warm)
        FedAvg.round(self, server, cohort)


@pytest.mark.parametrize("ahead", [0, 4])
def test_waiting_for_one_client_changes_no_group(ahead: int) -> None:
    simulation = tiny.simulation(OneFirst(), cohort_size=6, stack=3, rounds=1)
    groups: list[tuple[str, int]] = []
    note_submitted(simulation, lambda requests: groups.append((requests[0].step.__name__, len(requests))))
    simulation.executor.prefetch = ahead
    tiny.run_rounds(simulation)
    assert [size for _, size in groups] == [1, 1, 3, 3, 2, 3]
    assert [step for step, _ in groups[:3]] == ["practise", "warm", "practise"]


def test_a_stack_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one client"):
        tiny.simulation(FedAvg(), stack=0)


def choose(state: Any, together: Callable[[int], float], workers: int = 1) -> int:
    """Choose where a client alone takes a second, and a stack what a function says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotune, "measure_alone", lambda state, clients: 1.0)
        patch.setattr(autotune, "measure_together", lambda state, clients: together(len(clients)))
        return choose_stack_size(state, workers)


def populous(cohort_size: int = 48, rounds: int = 1000, **changes: Any) -> Any:
    return tiny.simulation(
        FedAvg(), federation=tiny.federation((2,) * 60), cohort_size=cohort_size, rounds=rounds, **changes
    )


def test_stacks_are_chosen_where_they_are_clearly_quicker() -> None:
    def half(clients: int) -> float:
        return 0.5 * clients + 1

    assert choose(populous(), half) == 32  # 24 s of training and 2 groups: 26 s; with stacks of 16: 27 s
    assert choose(populous(), half, workers=3) == 16  # 3 groups of 16 side by side: 9 s; 2 of 24: 13 s
    assert choose(populous(cohort_size=4), half) == 16  # one group of all four: 3 s instead of 4
    assert choose(populous(cohort_size=4), half, workers=2) == 1  # 2 s one by one on two workers, 3 s as one
    assert choose(populous(), lambda clients: 0.9 * clients) == 1, "a tenth is not worth another rounding"
    assert choose(populous(), lambda clients: 1.5 * clients) == 1


def test_a_first_stack_that_is_slower_ends_the_search() -> None:
    tried: list[int] = []
    assert choose(populous(), lambda clients: tried.append(clients) or 2.0 * clients) == 1  # type: ignore[func-returns-value]
    assert tried == [16]


@pytest.mark.parametrize(("seconds", "measured"), [(0.001, [4, 16]), (1.0, [4])])
def test_more_clients_are_measured_where_a_few_take_too_little_time(
    seconds: float, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def alone(state: Any, clients: list[str]) -> float:
        counts.append(len(clients))
        return seconds

    monkeypatch.setattr(autotune, "measure_alone", alone)
    monkeypatch.setattr(autotune, "measure_together", lambda state, clients: 99.0)
    assert choose_stack_size(populous()) == 1
    assert counts == measured


def test_nothing_is_measured_where_no_stack_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(state: Any, clients: list[str]) -> float:
        pytest.fail("measured")

    monkeypatch.setattr(autotune, "measure_alone", measure)
    monkeypatch.setattr(autotune, "measure_together", measure)

    on_a_gpu = populous()  # where steps are captured, which is quicker than stacks
    on_a_gpu.settings.device = torch.device("cuda")
    convolutions = populous(
        factory=lambda: LeNet5().build((1, 28, 28), tiny.CLASSES), training=replace(PLAIN, batch_size=9)
    )
    for state in (populous(rounds=20), populous(factory=body(nn.BatchNorm1d(16))), on_a_gpu, convolutions):
        assert choose_stack_size(state) == 1


def test_measuring_changes_nothing() -> None:
    measured, untouched = populous(rounds=25), populous(rounds=25)
    assert choose_stack_size(measured) in (1, *STACK_SIZES)
    tiny.run_rounds(measured, 2)
    tiny.run_rounds(untouched, 2)
    assert tiny.equal(measured.server.model, untouched.server.model)


def test_distillation_is_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The methods that the house is for must be among those that gain."""
    trained: list[int] = []
    whole = ModelStack.fit
    monkeypatch.setattr(ModelStack, "fit", lambda self: trained.append(len(self.group)) or whole(self))
    tiny.run_rounds(tiny.simulation(FedNTD(), cohort_size=6, stack=6))
    assert trained == [6, 6, 6, 6]


def test_bfloat16_is_stacked() -> None:
    of, training = ModelRunner(tiny.network, 0, CPU), replace(PLAIN, precision="bfloat16")

    def result() -> list[TrainJob]:
        return [replace(one, model=of.initial, streams=[floated(one.streams[0])]) for one in group(of)]

    stacked = ModelStack(of, training, result()).fit()
    for one, other in zip(stacked, [fit(of, assignment, training) for assignment in result()], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=0.02)
        for name in one.model:
            torch.testing.assert_close(one.model[name], other.model[name], rtol=0.1, atol=0.02)
    fine = ModelStack(of, PLAIN, result()).fit()
    assert not tiny.equal(fine[0].model, stacked[0].model), "it was computed otherwise"


def floated(of: BatchStream) -> BatchStream:
    return replace(of, data={name: column.float() if name == "input" else column for name, column in of.data.items()})


def test_texts_of_any_length_are_stacked() -> None:
    """Also the vector of what fills a text up stays what it is, which vmap does not respect by itself."""
    of = networks(lambda: EmbeddingBag(vocabulary=9, width=4, hidden=(5,)).build((6,), tiny.CLASSES))
    assert of.stackable

    def texts(count: int, seed: int) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(seed)
        tokens = torch.randint(1, 9, (count, 6), generator=rng)
        tokens[:, 1 + seed :] = 0
        return {"input": tokens, "label": torch.randint(tiny.CLASSES, (count,), generator=rng)}

    def jobs() -> list[TrainJob]:
        return [
            TrainJob(of.initial, CrossEntropy(), [source(texts(7 + n, n), n)], epochs=3, round=1, seed=0)
            for n in range(3)
        ]

    stacked = VmapTrainer(of, PLAIN).fit(jobs())
    agree([one for one in stacked if isinstance(one, Fit)], [fit(of, job, PLAIN) for job in jobs()])


def test_a_network_that_leaves_out_a_vector_by_itself_is_not_stacked() -> None:
    def factory() -> nn.Module:
        return Network(nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten()), 24, tiny.CLASSES)

    assert not networks(factory).stackable


def test_the_trouble_of_one_client_is_no_others() -> None:
    of = networks()
    empty = {name: column[:0] for name, column in columns(1, 0).items()}

    def job(number: int) -> TrainJob:
        second = empty if number == 2 else columns(5, 9)
        streams = [source(columns(8, number), number), source(second, number)]
        return TrainJob(of.initial, CrossEntropy() + CrossEntropy(dataset_index=1), streams, epochs=1, round=1, seed=0)

    results = VmapTrainer(of, PLAIN).fit([job(0), job(1), job(2)])
    assert isinstance(results[2], ValueError)
    agree([one for one in results if isinstance(one, Fit)], [fit(of, job(number), PLAIN) for number in (0, 1)])


def test_a_stack_that_fails_later_trains_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    of, steps = networks(), ModelStack.step
    calls = []

    def step(self: ModelStack, *args: Any) -> None:
        calls.append(1)
        if len(calls) > 6:  # in the second epoch
            raise RuntimeError("cannot be vectorised")
        steps(self, *args)

    monkeypatch.setattr(ModelStack, "step", step)
    results = VmapTrainer(of, PLAIN).fit(group(of))
    assert len(calls) > 6
    assert all(isinstance(one, Fit) for one in results)
    agree([one for one in results if isinstance(one, Fit)], [fit(of, job, PLAIN) for job in group(of)])


def test_a_member_that_is_left_alone_is_tried_too() -> None:
    """Group norm in channels-last cannot be vectorised over one member, nor can what is tried on all of them tell."""
    of = ModelRunner(lambda: ResNet18(norm="group").build((3, 8, 8), tiny.CLASSES), 0, CPU)

    def job(number: int) -> TrainJob:
        data = {
            name: c.float() if c.is_floating_point() else c for name, c in columns(6 + number, 1, (3, 8, 8)).items()
        }
        stream = replace(source(data, 1), layout=torch.channels_last)
        return TrainJob(of.initial, CrossEntropy(), [stream], epochs=1, round=1, seed=0)

    assert all(isinstance(one, Fit) for one in VmapTrainer(of, PLAIN).fit([job(0), job(1), job(2)]))
