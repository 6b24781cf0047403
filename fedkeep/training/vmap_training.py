"""Train several parties as one stacked model: the same steps as `fedkeep.training.local_training`, many at a time.

A small network leaves most of a machine idle: calling its layers takes longer than computing them. With the weights of
several clients stacked, one call computes the layer of all. Objectives and networks are not written for that:
`torch.func.vmap` carries each over. What it refuses, such as dropout or a loss that branches on a value, is trained in
the loop, and so are networks of the user's own, and those with buffers or frozen weights. The result is the loop's up
to rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedkeep._utils.devices import to_device
from fedkeep.interface import Fit, Training
from fedkeep.interface.pytree import replace_tensors, stack_tensors
from fedkeep.losses import Batch, Loss
from fedkeep.models.weights import find_mismatch
from fedkeep.training.local_training import NetworkView, TrainJob, autocast, fit
from fedkeep.training.model_runner import ModelRunner

Rows: TypeAlias = slice | Tensor  # all members of a stack, as views; or some, as copies
MAX_SIGNATURES = 100  # of training that are remembered


class VmapTrainer:
    """Trains parties side by side where that is possible, and the others one after another."""

    def __init__(self, runner: ModelRunner, training: Training) -> None:
        self.runner = runner
        self.training = training
        self._possible: dict[Hashable, bool] = {}  # by signature of training

    def fit(self, jobs: Sequence[TrainJob]) -> list[Fit | Exception]:
        """Carry out trainings; return what came of each, in the order given."""
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for number, job in enumerate(jobs):
            groups[job.signature if job.examples else number].append(number)
        found: dict[int, Fit | Exception] = {}
        for signature, numbers in groups.items():
            group = [jobs[number] for number in numbers]
            stacked = len(group) > 1 and self._can_stack(signature, group)
            found |= zip(numbers, self._stacked(group) if stacked else map(self._alone, group), strict=True)
        return [found[number] for number in range(len(jobs))]

    def _alone(self, job: TrainJob) -> Fit | Exception:
        try:
            return fit(self.runner, job, self.training)
        except Exception as error:
            return error

    def _stacked(self, group: Sequence[TrainJob]) -> Sequence[Fit | Exception]:
        try:
            return ModelStack(self.runner, self.training, group).fit()
        except Exception as error:
            error.add_note(
                f"It was one of {len(group)} trained as one stacked model; --stack 1 trains one after another."
            )
            return [error] * len(group)

    def _can_stack(self, signature: Hashable, group: Sequence[TrainJob]) -> bool:
        """Tell whether a signature of training can be stacked, by trying one step of the first two on a few rows."""
        if not self.runner.stackable:
            return False
        if any(find_mismatch(job.model, self.runner.initial) for job in group):
            return False  # the loop says what is wrong
        if any(job.parametrization or job.step_callback for job in group):
            return False  # a stack holds the network's own weights, and everybody's in one
        if len(self._possible) > MAX_SIGNATURES:  # objectives that hold functions made anew are new groups each time
            self._possible.clear()
        if signature not in self._possible:
            self._possible[signature] = self._succeeds(group[:2])
        return self._possible[signature]

    def _succeeds(self, group: Sequence[TrainJob]) -> bool:
        rows = min(2, *(len(stream.data["image"]) for job in group for stream in job.streams))
        batches = [[stream.first(rows) for stream in job.streams] for job in group]
        try:
            stack = ModelStack(self.runner, self.training, group)
            everyone = slice(None)
            stack.step(everyone, stack.gradients(everyone, batches)[1])
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # whatever it is: if something is wrong with the objective, the loop will say so
            return False
        return True


class ModelStack:
    """One group in training: every weight with a leading dimension, the parties."""

    def __init__(self, runner: ModelRunner, training: Training, group: Sequence[TrainJob]) -> None:
        self.runner = runner
        self.training = training
        self.group = group
        models = [job.model for job in group]
        self.weights = {name: torch.stack([model[name] for model in models]) for name in runner.initial}
        momenta = runner.parameters if training.momentum else ()
        self.momenta = {name: torch.zeros_like(self.weights[name]) for name in momenta}
        self.strides_matched = False
        self.objective = group[0].objective
        self.constants = stack_tensors([job.objective for job in group])

    def fit(self) -> list[Fit]:
        """Take all steps of all parties."""
        count = len(self.group)
        losses, taken = torch.zeros(count, device=self.runner.device), [0] * count
        ahead = [job.steps(self.training.batch_size, merge_last=False) for job in self.group]
        for members, batches in _side_by_side(ahead):
            rows = self._rows(members)
            loss, gradients = self.gradients(rows, batches)
            self.step(rows, gradients)
            losses[rows] += loss
            for member in members:
                taken[member] += 1
        self.runner.classifier_input = None  # what the classifier was given holds on to the whole stack
        means = (losses / torch.tensor(taken, device=losses.device).clamp(min=1)).tolist()
        return [
            # A copy of its own for each: a party that keeps its model must not keep everybody's.
            Fit(
                {name: weight[k].clone(memory_format=torch.contiguous_format) for name, weight in self.weights.items()},
                job.examples,
                taken[k],
                means[k],
            )
            for k, job in enumerate(self.group)
        ]

    def _rows(self, members: Sequence[int]) -> Rows:
        """Return what selects members in a stack: a slice gives views of everybody's, an index copies of some."""
        return slice(None) if len(members) == len(self.group) else to_device(torch.tensor(members), self.runner.device)

    def gradients(self, rows: Rows, batches: Sequence[list[Batch]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses [m] of some members on their batches, and the gradients by parameter, [m, ...]."""
        weights = {name: weight[rows] for name, weight in self.weights.items()}
        constants = [constant[rows] for constant in self.constants]
        parameters = {name: weights[name].requires_grad_() for name in self.runner.parameters}
        stacked = [_stacked([one[number] for one in batches]) for number in range(len(batches[0]))]
        with autocast(self.training.precision, self.runner.device):
            loss = vmap(self._loss)(weights, stacked, constants)
        gradients = torch.autograd.grad(loss.sum(), list(parameters.values()))
        return loss.detach(), dict(zip(parameters, gradients, strict=True))

    def _loss(
        self,
        weights: Mapping[str, Tensor],
        batches: Sequence[tuple[dict[str, Tensor], Tensor]],
        constants: list[Tensor],
    ) -> Tensor:
        """Return one party's loss; `vmap` makes it everybody's."""
        network = self.runner.train_network.train()
        parameters = {name: weights[name] for name in self.runner.parameters}
        view = NetworkView(self.runner, parameters, lambda images: functional_call(network, dict(weights), (images,)))
        objective: Loss = replace_tensors(self.objective, constants)
        return objective(view, [Batch(data, index) for data, index in batches])

    @torch.no_grad()
    def step(self, rows: Rows, gradients: dict[str, Tensor]) -> None:
        """Let some members take a step as torch.optim.SGD takes it."""
        training = self.training
        if not self.strides_matched and isinstance(rows, slice):
            self._match_strides(gradients)
        weights = [self.weights[name][rows] for name in gradients]
        steps = list(gradients.values())
        # Not in place: autograd may give one tensor as the gradient of two weights.
        if training.clip is not None:
            steps = _clipped(steps, training.clip)
        if training.weight_decay:
            steps = list(torch._foreach_add(steps, weights, alpha=training.weight_decay))
        if training.momentum:
            momenta = [self.momenta[name][rows] for name in gradients]
            torch._foreach_mul_(momenta, training.momentum)
            torch._foreach_add_(momenta, steps)
            steps = momenta
        torch._foreach_add_(weights, steps, alpha=-training.lr_at(self.group[0].round))
        if isinstance(rows, slice):
            return
        for name, weight, step in zip(gradients, weights, steps, strict=True):
            self.weights[name][rows] = weight
            if training.momentum:
                self.momenta[name][rows] = step

    def _match_strides(self, gradients: Mapping[str, Tensor]) -> None:
        """Lay the weights out in memory as their gradients come, so that every update reads both in one direction."""
        self.strides_matched = True
        for kept in (self.weights, self.momenta):
            for name, gradient in gradients.items():
                if name in kept and kept[name].stride() != gradient.stride():
                    kept[name] = torch.empty_like(gradient).copy_(kept[name])


def _side_by_side(streams: Sequence[Iterator[list[Batch]]]) -> Iterator[tuple[list[int], list[list[Batch]]]]:
    """Yield members whose next batches are of the same lengths, and these batches.

    A stack must be rectangular, and the last batch of a pass is shorter for each client by its own number of examples.
    Shorter batches go first, so that for the full ones all members are together again.
    """
    waiting = {member: batches for member, stream in enumerate(streams) if (batches := next(stream, None)) is not None}
    while waiting:
        shapes: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for member, batches in waiting.items():
            shapes[tuple(len(batch.index) for batch in batches)].append(member)
        members = shapes[min(shapes)]
        yield members, [waiting[member] for member in members]
        for member in members:
            following = next(streams[member], None)
            if following is None:
                del waiting[member]
            else:
                waiting[member] = following


def _stacked(batches: Sequence[Batch]) -> tuple[dict[str, Tensor], Tensor]:
    data = {name: torch.stack([batch.data[name] for batch in batches]) for name in batches[0].data}
    return data, torch.stack([batch.index for batch in batches])


def _clipped(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Return each party's gradients, [m, ...], scaled as torch.nn.utils.clip_grad_norm_ scales one party's."""
    norms = torch.stack([gradient.reshape(len(gradient), -1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors = (limit / (norms + 1e-6)).clamp(max=1.0)
    return [gradient * factors.view(-1, *[1] * (gradient.dim() - 1)) for gradient in gradients]
