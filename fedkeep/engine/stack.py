"""Train several parties as one stacked model: the same steps as `fedkeep.engine.fit`, many at a time.

A small network leaves most of a machine idle: calling its layers takes longer than computing them. With the weights of
several clients stacked, one call computes the layer of all. Objectives and networks are not written for that:
`torch.func.vmap` carries each over. What it refuses, such as dropout, batch norm or a loss that branches on a value, is
trained in the loop. The result is the loop's up to rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedkeep.engine.fit import Assignment, Pupil, fit, precisely
from fedkeep.engine.networks import Networks
from fedkeep.interface import Fit, Training
from fedkeep.objectives import Batch, Objective

Rows: TypeAlias = slice | Tensor


class Stacks:
    """Trains parties side by side where that is possible, and the others one after another."""

    def __init__(self, networks: Networks, training: Training) -> None:
        self.networks = networks
        self.training = training
        self._possible: dict[Hashable, bool] = {}  # by kind of training

    def fit(self, assignments: Sequence[Assignment]) -> list[Fit]:
        """Carry out trainings; the results are in the order given."""
        kinds: dict[Hashable, list[int]] = defaultdict(list)
        for number, assignment in enumerate(assignments):
            kinds[_kind(assignment) if assignment.examples else number].append(number)
        fits: dict[int, Fit] = {}
        for kind, numbers in kinds.items():
            group = [assignments[number] for number in numbers]
            if len(group) > 1 and self._can_stack(kind, group):
                done = Stack(self.networks, self.training, group).fit()
            else:
                done = [fit(self.networks, assignment, self.training) for assignment in group]
            fits |= zip(numbers, done, strict=True)
        return [fits[number] for number in range(len(assignments))]

    def _can_stack(self, kind: Hashable, group: Sequence[Assignment]) -> bool:
        """Tell whether a kind of training can be stacked, by trying one step of the first two on a few rows."""
        if kind not in self._possible:
            self._possible[kind] = not self.networks.has_batch_norm and self._succeeds(group[:2])
        return self._possible[kind]

    def _succeeds(self, group: Sequence[Assignment]) -> bool:
        rows = min(2, *(len(source.data["image"]) for assignment in group for source in assignment.sources))
        batches = [[source.first(rows) for source in assignment.sources] for assignment in group]
        try:
            Stack(self.networks, self.training, group).gradients(slice(None), batches)
        except Exception:  # whatever it is: if something is wrong with the objective, the loop will say so
            return False
        return True


class Stack:
    """One group in training: every weight with a leading dimension, the parties."""

    def __init__(self, networks: Networks, training: Training, group: Sequence[Assignment]) -> None:
        self.networks = networks
        self.training = training
        self.group = group
        models = [assignment.model for assignment in group]
        self.weights = {name: torch.stack([model[name] for model in models]) for name in networks.initial}
        momenta = networks.parameters if training.momentum else ()
        self.momenta = {name: torch.zeros_like(self.weights[name]) for name in momenta}
        self.laid_out = False
        self.objective = group[0].objective
        each = [_tensors(assignment.objective) for assignment in group]
        together = [_together(tensors) for tensors in zip(*each, strict=True)]
        self.constants, self.constant_dims = [tensor for tensor, _ in together], [dim for _, dim in together]

    def fit(self) -> list[Fit]:
        """Take all steps of all parties."""
        count = len(self.group)
        losses, taken = torch.zeros(count, device=self.networks.device), [0] * count
        ahead = [assignment.steps(self.training.batch_size, merge_last=False) for assignment in self.group]
        for members, batches in _side_by_side(ahead):
            rows = self._rows(members)
            loss, gradients = self.gradients(rows, batches)
            self._step(rows, gradients)
            losses[rows] += loss
            for member in members:
                taken[member] += 1
        means = (losses / torch.tensor(taken, device=losses.device).clamp(min=1)).tolist()
        return [
            # A copy of its own for each: a party that keeps its model must not keep everybody's.
            Fit(
                {name: weight[k].clone(memory_format=torch.contiguous_format) for name, weight in self.weights.items()},
                assignment.examples,
                taken[k],
                means[k],
            )
            for k, assignment in enumerate(self.group)
        ]

    def _rows(self, members: Sequence[int]) -> Rows:
        """Return what selects members in a stack: a slice gives views of everybody's, an index copies of some."""
        return slice(None) if len(members) == len(self.group) else torch.tensor(members, device=self.networks.device)

    def gradients(self, rows: Rows, batches: Sequence[list[Batch]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses [m] of some members on their batches, and the gradients by parameter, [m, ...]."""
        weights = {name: weight[rows] for name, weight in self.weights.items()}
        dims = self.constant_dims
        constants = [c if dim is None else c[rows] for c, dim in zip(self.constants, dims, strict=True)]
        parameters = {name: weights[name].requires_grad_() for name in self.networks.parameters}
        stacked = [_stacked([one[number] for one in batches]) for number in range(len(batches[0]))]
        with precisely(self.training.precision, self.networks.device):
            loss = vmap(self._loss, in_dims=(0, 0, dims))(weights, stacked, constants)
        gradients = torch.autograd.grad(loss.sum(), list(parameters.values()))
        return loss.detach(), dict(zip(parameters, gradients, strict=True))

    def _loss(
        self,
        weights: Mapping[str, Tensor],
        batches: Sequence[tuple[dict[str, Tensor], Tensor]],
        constants: list[Tensor],
    ) -> Tensor:
        """Return one party's loss; `vmap` makes it everybody's."""
        network = self.networks.trained.train()
        parameters = {name: weights[name] for name in self.networks.parameters}
        pupil = Pupil(self.networks, parameters, lambda images: functional_call(network, dict(weights), (images,)))
        given = iter(constants)
        objective: Objective = _mapped(self.objective, lambda tensor, column: next(given))
        return objective(pupil, [Batch(data, index) for data, index in batches])

    @torch.no_grad()
    def _step(self, rows: Rows, gradients: dict[str, Tensor]) -> None:
        """Let some members take a step as torch.optim.SGD takes it."""
        training = self.training
        if not self.laid_out and isinstance(rows, slice):
            self._lie_like(gradients)
        weights = [self.weights[name][rows] for name in gradients]
        steps = list(gradients.values())
        if training.clip is not None:
            _clip(steps, training.clip)
        if training.weight_decay:
            torch._foreach_add_(steps, weights, alpha=training.weight_decay)
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

    def _lie_like(self, gradients: Mapping[str, Tensor]) -> None:
        """Lay the weights out in memory as their gradients come, so that every update reads both in one direction."""
        self.laid_out = True
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


def _clip(gradients: Sequence[Tensor], limit: float) -> None:
    """Scale each party's gradients, [m, ...], in place, as torch.nn.utils.clip_grad_norm_ does one party's."""
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors = (limit / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))


def _kind(assignment: Assignment) -> Hashable:
    """Return what trainings must have in common to be stacked."""
    return tuple(_form(dict(source.data), True) for source in assignment.sources), _form(assignment.objective, False)


def _form(value: Any, column: bool) -> Hashable:
    """Return all of a value but the numbers inside its tensors, and how long they are if they are columns."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape[1:] if column else value.shape
    if isinstance(value, Mapping):
        return tuple((key, _form(item, column)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), *(_form(item, column) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), *(_form(item, inside) for _, item, inside in _fields(value, column))
    return value if isinstance(value, Hashable) else object()  # equal to nothing


def _mapped(value: Any, function: Callable[[Tensor, bool], Tensor], column: bool = False) -> Any:
    """Return a value with every tensor replaced; the function is told which tensors are columns."""
    if isinstance(value, Tensor):
        return function(value, column)
    if isinstance(value, Mapping):
        return {key: _mapped(item, function, column) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, function, column) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{name: _mapped(item, function, inside) for name, item, inside in _fields(value, column)}
        )
    return value


def _fields(value: Any, column: bool) -> Iterator[tuple[str, Any, bool]]:
    """Yield the fields of a dataclass: name, content, and whether it holds columns."""
    named = value.columns if isinstance(value, Objective) else ()
    return ((field.name, getattr(value, field.name), column or field.name in named) for field in fields(value))


def _tensors(objective: Objective) -> list[tuple[Tensor, bool]]:
    """Return an objective's tensors in order, and which are columns."""
    found: list[tuple[Tensor, bool]] = []

    def note(tensor: Tensor, column: bool) -> Tensor:
        found.append((tensor, column))
        return tensor

    _mapped(objective, note)
    return found


def _together(tensors: Sequence[tuple[Tensor, bool]]) -> tuple[Tensor, int | None]:
    """Return what the parties have in one place of their objectives, stacked, and the dimension of the parties.

    What is one tensor for all, such as the global model, is not stacked. Columns are filled up to the longest with rows
    that nobody reads.
    """
    first, is_column = tensors[0]
    if all(tensor is first for tensor, _ in tensors):
        return first, None
    if not is_column:
        return torch.stack([tensor for tensor, _ in tensors]), 0
    longest = max(len(tensor) for tensor, _ in tensors)
    filled = [torch.cat((tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:]))) for tensor, _ in tensors]
    return torch.stack(filled), 0
