"""FedSKF on the real interface: the server fuses along the base's neurons, clients keep a classifier of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.models import Weights
from fedkeep.models.weights import mean
from fedkeep.objectives import NOTHING, Batch, Data, Objective, Student
from fedkeep.options import option


@dataclass(frozen=True, eq=False)
class NewClasses(Objective):
    """Cross-entropy among the classes from ``known`` on: older rows of the classifier do not compete."""

    known: int

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        return cross_entropy(student.logits(batches[0])[:, self.known :], batches[0].data["label"] - self.known)


@dataclass(frozen=True, eq=False)
class Pull(Objective):
    """weight * sum ||w - anchor||^2 over the tensors that the anchor names."""

    weight: float
    anchor: Weights

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        squares = [(student.weights[name] - tensor).square().sum() for name, tensor in self.anchor.items()]
        return self.weight * torch.stack(squares).sum()


@dataclass(frozen=True, eq=False)
class OldClasses(Objective):
    """sum_k weight_k * cross-entropy with teacher k's probabilities among the first ``known`` classes.

    Settled, it holds what the teachers said, [n, known], instead of the teachers.
    """

    teachers: tuple[Weights, ...]
    weights: tuple[float, ...]
    known: int
    tau: float
    said: Tensor | None = None

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = batches[0]
        said = self.said[batch.index] if self.said is not None else self.fold(lambda w: student.frozen(w, batch))
        own = (student.logits(batch)[:, : self.known] / self.tau).log_softmax(-1)
        return -(said * own).sum(-1).mean()

    def settle(self, answer: Callable[[Weights], Tensor], data: Data, on: int) -> Objective:
        return self if on or self.said is not None else replace(self, teachers=(), said=self.fold(answer))

    def fold(self, answer: Callable[[Weights], Tensor]) -> Tensor:
        shares = [(answer(teacher)[:, : self.known] / self.tau).softmax(-1) for teacher in self.teachers]
        return torch.stack([weight * share for weight, share in zip(self.weights, shares, strict=True)]).sum(0)


@dataclass
class Turn:
    """What the server keeps: whose neurons are the base next."""

    base: int = 0


@dataclass
class Personal:
    """What a client keeps: its classifier, how many classes are old, and what its old models have to say."""

    classifier: Weights | None = None
    known: int = 0
    lesson: Objective = NOTHING  # holds both old models until it is settled, once per task


@dataclass(frozen=True)
class FedSKF(Algorithm[Turn, Personal]):
    """Fusion of structure and knowledge: CE[new] + pull to the global classifier + local and global old teachers.

    Left out: the term that recombines old and new logits, exemplars, and all fusions but the entropic one.
    """

    title = "Sketch FedSKF"

    pull: float = option(2.0, "weight of the pull to the global classifier (alpha in the paper)", low=0.0)
    w_local: float = option(3.0, "weight of the old local teacher (beta in the paper)", low=0.0)
    w_global: float = option(1.0, "weight of the old global teacher (gamma in the paper)", low=0.0)
    tau: float = option(2.0, "softmax temperature", low=1e-3)

    def round(self, server: Server[Turn], cohort: Cohort) -> None:
        models = [fit.model for fit in cohort.ask(self.train, server.model).values()]
        base = models[server.state.base % len(models)]
        server.model = mean([projected(mean(models), base, server.network(base)), base])
        server.state.base += 1

    def end_task(self, server: Server[Turn], clients: Cohort) -> None:
        clients.ask(self.remember, server.model)

    @on_client
    def train(self, client: Client[Personal], model: Weights) -> Fit:
        """Train the global extractor under the client's own classifier, which meets the global one in round two."""
        kept = client.state
        start = model if kept.classifier is None or client.round == 2 else {**model, **kept.classifier}
        kept.lesson = client.settle(kept.lesson)
        pull = Pull(self.pull, classifier(model)) if client.round > 1 else NOTHING
        fit = client.fit(start, NewClasses(kept.known) + kept.lesson + pull)
        kept.classifier = classifier(fit.model)
        return fit

    @on_client
    def remember(self, client: Client[Personal], model: Weights) -> None:
        """Keep the task's last models, the own and the global one, as teachers of the next."""
        kept = client.state
        own = {**model, **(kept.classifier or {})}
        kept.known = client.classes
        kept.lesson = OldClasses((own, model), (self.w_local, self.w_global), kept.known, self.tau)


def classifier(model: Weights) -> Weights:
    """Return the last layer of a model."""
    return {name: tensor for name, tensor in model.items() if name.startswith("classifier.")}


def projected(source: Weights, base: Weights, network: nn.Module) -> Weights:
    """Return the source with its neurons in the base's order, layer by layer, by entropic optimal transport."""
    moved, plan = dict(source), None
    for layer in (name for name, module in network.named_modules() if isinstance(module, nn.Linear)):
        weight = source[f"{layer}.weight"] if plan is None else source[f"{layer}.weight"] @ plan
        if layer != "classifier":  # whose rows are the classes
            cost = torch.cdist(weight.double(), base[f"{layer}.weight"].double())
            log = -cost / (0.01 * cost.mean())
            for _ in range(20):
                log = log.log_softmax(1).log_softmax(0)
            plan = log.exp().to(weight.dtype)
            weight, moved[f"{layer}.bias"] = plan.T @ weight, plan.T @ source[f"{layer}.bias"]
        moved[f"{layer}.weight"] = weight
    return moved
