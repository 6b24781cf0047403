"""Train several clients as one stacked model, with the same steps as `fedkeep.training.local_training`.

A small network uses little of a machine: calling its layers takes longer than computing them. With the weights of
several clients stacked, one call computes a layer for all of them. `torch.func.vmap` does this for losses and networks
that are not written for it. Some jobs are trained one after another instead: those that `vmap` refuses, such as dropout
or a loss that branches on a value, the user's own networks, and networks with buffers or frozen weights. Results equal
those of the loop up to rounding.
"""

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedkeep._utils import progress
from fedkeep._utils.torch_state import to_device
from fedkeep.interface import Fit, Training
from fedkeep.interface.pytree import replace_tensors, stack_tensors
from fedkeep.losses import Batch, CrossEntropy, Loss, ModelView
from fedkeep.losses.base import check_scalar
from fedkeep.losses.decoupled import upcast
from fedkeep.losses.wrappers import replace_cross_entropy
from fedkeep.models.weights import find_mismatch
from fedkeep.training.local_training import NetworkView, TrainJob, autocast, clip_factors, fit
from fedkeep.training.model_runner import ModelRunner

log = logging.getLogger(__name__)
Rows: TypeAlias = slice | Tensor  # an index of all members of a stack, which gives views; or of some, which copies
MAX_SIGNATURES = 100  # for which it is remembered whether their jobs can be stacked


class VmapTrainer:
    """Trains clients stacked where that is possible, and the others one after another."""

    def __init__(self, runner: ModelRunner, training: Training) -> None:
        self.runner = runner
        self.training = training
        self._told = False
        self._possible: dict[Hashable, bool] = {}  # whether jobs can be stacked, by signature

    def fit(self, jobs: Sequence[TrainJob]) -> list[Fit | Exception]:
        """Carry out local trainings.

        Returns: The result of each training, or the exception that it raised, in the same order.
        """
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for number, job in enumerate(jobs):
            groups[job.signature if job.num_examples else number].append(number)
        results: dict[int, Fit | Exception] = {}
        for signature, numbers in groups.items():
            group = [jobs[number] for number in numbers]
            stacked = len(group) > 1 and self._can_stack(signature, group)
            results |= zip(numbers, self._stacked(group) if stacked else map(self._alone, group), strict=True)
        return [results[number] for number in range(len(jobs))]

    def _alone(self, job: TrainJob) -> Fit | Exception:
        try:
            return fit(self.runner, job, self.training)
        except Exception as error:
            return error

    def _stacked(self, group: Sequence[TrainJob]) -> Sequence[Fit | Exception]:
        generators = [g for job in group for stream in job.streams for g in (stream.order, stream.noise)]
        states = [generator.get_state() for generator in generators]
        try:
            return ModelStack(self.runner, self.training, group).fit()
        except torch.cuda.OutOfMemoryError as error:
            error.add_note(
                f"It was one of {len(group)} trained as one stacked model; --stack 1 trains one after another."
            )
            return [error] * len(group)
        except Exception as error:  # one client's trouble is no other's, and some operations cannot be vectorised
            log.info("%d clients are trained one after another: %s", len(group), error)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)  # the same batches as without a stack
            return [self._alone(job) for job in group]

    def _can_stack(self, signature: Hashable, group: Sequence[TrainJob]) -> bool:
        """Tell whether jobs of a signature can be stacked, by trying one step of the first two on a few examples."""
        if not self.runner.stackable:
            return False
        if self.training.optimizer != "sgd":
            if not self._told:
                log.warning("Clients train one after another: only SGD trains stacks of clients.")
                self._told = True
            return False
        if any(find_mismatch(job.model, self.runner.initial) for job in group):
            return False  # the loop raises an error that says what is wrong
        if any(job.parametrization for job in group):
            return False  # a stack contains the network's weights only, and those of all clients in one tensor
        # Losses that contain newly created functions have a new signature each time.
        if len(self._possible) > MAX_SIGNATURES:
            self._possible.clear()
        if signature not in self._possible:
            self._possible[signature] = self._succeeds(group[:2])
        return self._possible[signature]

    def _succeeds(self, group: Sequence[TrainJob]) -> bool:
        rows = min(2, *(len(stream.data["input"]) for job in group for stream in job.streams))
        batches = [[stream.first(rows) for stream in job.streams] for job in group]
        try:
            stack = ModelStack(self.runner, self.training, group)
            all_members = slice(None)
            stack.step(all_members, stack.gradients(all_members, batches)[1])
            one = to_device(torch.tensor([0]), self.runner.device)  # as when only the largest client has a batch left
            stack.step(one, stack.gradients(one, batches[:1])[1])
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # if the loss is wrong, the loop will raise the error again
            return False
        return True


@dataclass(frozen=True, eq=False)
class _CrossEntropy(Loss):
    """A cross-entropy in operations that `vmap` knows, with the same bits; for `nll_loss` it imports SymPy first."""

    like: CrossEntropy

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.like.dataset_index]
        labels = batch.data["label"]
        log_p = (upcast(model.logits(batch)) / self.like.tau).log_softmax(-1)
        return -log_p.gather(-1, labels.unsqueeze(-1)).sum() / len(labels)


class ModelStack:
    """The stacked models of a group of jobs: every weight has a leading dimension for the clients.

    ``group``: Jobs that have the same signature.
    """

    def __init__(self, runner: ModelRunner, training: Training, group: Sequence[TrainJob]) -> None:
        self.runner = runner
        self.training = training
        self.group = group
        models = [job.model for job in group]
        self.weights = {name: torch.stack([model[name] for model in models]) for name in runner.initial}
        momenta = runner.parameters if training.momentum else ()
        self.momenta = {name: torch.zeros_like(self.weights[name]) for name in momenta}
        self.strides_matched = False
        self.loss = replace_cross_entropy(group[0].loss, lambda term, _: _CrossEntropy(term))
        self.constants = stack_tensors([job.loss for job in group])

    def fit(self) -> list[Fit]:
        """Take all steps of all clients.

        Returns: The result of each job, in order.
        """
        count = len(self.group)
        losses, num_steps = torch.zeros(count, device=self.runner.device), [0] * count
        streams = [job.steps(self.training.batch_size, merge_last=False) for job in self.group]
        most = max(job.most_steps(self.training.batch_size) for job in self.group)
        for done, (members, batches) in enumerate(_side_by_side(streams)):
            progress.report("step", done, most, inside=True)
            rows = self._rows(members)
            loss, gradients = self.gradients(rows, batches)
            self.step(rows, gradients)
            losses[rows] += loss
            for member in members:
                num_steps[member] += 1
        self.runner.classifier_input = None  # it keeps the autograd graph of the whole stack alive
        means = (losses / torch.tensor(num_steps, device=losses.device).clamp(min=1)).tolist()
        return [
            # Copies, not views: a client that keeps its model must not keep those of all clients alive.
            Fit(
                {name: weight[k].clone(memory_format=torch.contiguous_format) for name, weight in self.weights.items()},
                job.num_examples,
                num_steps[k],
                means[k],
            )
            for k, job in enumerate(self.group)
        ]

    def _rows(self, members: Sequence[int]) -> Rows:
        """Return an index of members in the stack: for all a slice, which gives views; for some a tensor."""
        return slice(None) if len(members) == len(self.group) else to_device(torch.tensor(members), self.runner.device)

    def gradients(self, rows: Rows, batches: Sequence[list[Batch]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the losses and gradients of some clients.

        ``batches``: For each of these clients one batch of each data set.
        Returns: Loss of each client, [m].
        Returns: Gradients by parameter, [m, ...].
        """
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
        """Compute the loss of one client; `vmap` applies this to all of them."""
        network = self.runner.train_network.train()
        parameters = {name: weights[name] for name in self.runner.parameters}
        view = NetworkView(self.runner, parameters, lambda images: functional_call(network, dict(weights), (images,)))
        loss: Loss = replace_tensors(self.loss, constants)
        value = loss(view, [Batch(data, index) for data, index in batches])
        check_scalar(value, loss)
        return value

    @torch.no_grad()
    def step(self, rows: Rows, gradients: dict[str, Tensor]) -> None:
        """Update the weights of some clients as `torch.optim.SGD` does.

        ``gradients``: Gradients by parameter, [m, ...].
        """
        training = self.training
        if not self.strides_matched and isinstance(rows, slice):
            self._match_strides(gradients)
        weights = [self.weights[name][rows] for name in gradients]
        steps = list(gradients.values())
        # Not in place: autograd may give one tensor as the gradient of two weights.
        if training.max_grad_norm is not None:
            steps = _clipped(steps, training.max_grad_norm)
        if training.weight_decay:
            steps = list(torch._foreach_add(steps, weights, alpha=training.weight_decay))
        if training.momentum:
            momenta = [self.momenta[name][rows] for name in gradients]
            torch._foreach_mul_(momenta, training.momentum)
            torch._foreach_add_(momenta, steps)
            steps = momenta
        torch._foreach_add_(weights, steps, alpha=-training.lr_in_round(self.group[0].round))
        if isinstance(rows, slice):
            return
        for name, weight, step in zip(gradients, weights, steps, strict=True):
            self.weights[name][rows] = weight
            if training.momentum:
                self.momenta[name][rows] = step

    def _match_strides(self, gradients: Mapping[str, Tensor]) -> None:
        """Give weights the memory layout of their gradients, so that an update reads both in the same order."""
        self.strides_matched = True
        for kept in (self.weights, self.momenta):
            for name, gradient in gradients.items():
                if name in kept and kept[name].stride() != gradient.stride():
                    kept[name] = torch.empty_like(gradient).copy_(kept[name])


def _side_by_side(streams: Sequence[Iterator[list[Batch]]]) -> Iterator[tuple[list[int], list[list[Batch]]]]:
    """Yield members whose next batches have the same lengths, and these batches.

    A stack must be rectangular, but the length of an epoch's last batch depends on the client. Shorter batches are
    taken first, so that all members are together again for the full ones.
    """
    following = {member: next(stream, None) for member, stream in enumerate(streams)}  # None: it has ended
    while waiting := {member: batches for member, batches in following.items() if batches is not None}:
        shapes: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for member, batches in waiting.items():
            shapes[tuple(len(batch.index) for batch in batches)].append(member)
        members = shapes[min(shapes)]
        yield members, [waiting[member] for member in members]
        following = {**waiting, **{member: next(streams[member], None) for member in members}}


def _stacked(batches: Sequence[Batch]) -> tuple[dict[str, Tensor], Tensor]:
    data = {name: torch.stack([batch.data[name] for batch in batches]) for name in batches[0].data}
    return data, torch.stack([batch.index for batch in batches])


def _clipped(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Return each client's gradients, [m, ...], scaled as by `torch.nn.utils.clip_grad_norm_`."""
    factors = clip_factors(gradients, limit)
    return [gradient * factors.view(-1, *[1] * (gradient.dim() - 1)) for gradient in gradients]
