"""Local training with steps that `torch.compile` turns into one piece of machine code.

The layers of a small network take less time to compute than to call. Several steps of its training, with forward pass,
backward pass and update, are traced once for each form of loss and batch, and compiled as one graph. Everything that
differs between clients and rounds is an input of the graph: weights, learning rate, batches, teachers, their outputs.
So one graph serves all clients of a method.

Some steps run one by one as without compiling: those of a loss that branches on a value, of networks with random
numbers such as dropout, with a parametrization or a callback, of other optimizers than SGD, and those at the end of a
pass that do not fill a graph. Results equal those of the loop up to rounding.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fedkeep._utils import seeds
from fedkeep.interface import Training
from fedkeep.interface.pytree import replace_tensors, tree_tensors
from fedkeep.interface.training_settings import StepCallback
from fedkeep.losses import Batch, Loss
from fedkeep.losses.base import check_scalar
from fedkeep.training.local_training import NetworkView, SGDStepper, TrainJob, autocast, clip_gradients
from fedkeep.training.model_runner import ModelRunner

log = logging.getLogger(__name__)
MAX_STEPS = 8
"""Most steps in one graph: more take longer to compile and gain little."""
MAX_GRAPHS = 16
"""Most forms of loss and batch that are compiled: a loss with another Python number every time has another form."""

Graph = Callable[..., list[Tensor]]


class TorchCompiler:
    """Compiles the training steps of one network, and keeps the graphs.

    ``backend``: The backend of `torch.compile`; ``eager`` compiles nothing, for tests.
    """

    def __init__(self, runner: ModelRunner, training: Training, num_steps: int, backend: str = "inductor") -> None:
        self.runner = runner
        self.training = training
        self.num_steps = num_steps
        self.backend = backend
        self._graphs: dict[Hashable, Graph | None] = {}

    def stepper(self, job: TrainJob, weights: Mapping[str, Tensor], forward: Callable[[Tensor], Tensor]) -> SGDStepper:
        """Return what takes the steps of a local training.

        ``weights``: The trained weights by name.
        ``forward``: Runs the network with these weights.
        Returns: A `CompiledStepper`, or one that takes step by step where a job cannot be compiled.
        """
        settings = self.runner, weights, forward, self.training, self.training.lr_in_round(job.round)
        if job.parametrization is not None or job.step_callback is not None or self.training.optimizer != "sgd":
            return SGDStepper(*settings)
        return CompiledStepper(self, job, *settings)

    def graph(self, stepper: CompiledStepper, steps: Sequence[list[Batch]]) -> Graph | None:
        """Return the graph for steps of this form, which is compiled when it is first asked for.

        Returns: The graph; None if steps of this form cannot be compiled.
        """
        if not self.num_steps:  # there is no compiler
            return None
        form = stepper.signature(steps)
        if form not in self._graphs:
            room = len(self._graphs) < MAX_GRAPHS
            self._graphs[form] = self._compile(stepper, steps) if room else None
        return self._graphs[form]

    def _compile(self, stepper: CompiledStepper, steps: Sequence[list[Batch]]) -> Graph | None:
        inputs = stepper.inputs(steps)
        try:
            # The graph contains the backward passes. A trace shall draw nobody's random numbers.
            with torch.no_grad(), seeds.temporary_seed(0, self.runner.device):
                traced = make_fx(lambda *inputs: stepper.take_steps(*inputs))(*inputs)  # it takes no method
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # a branch on a value; if the loss is wrong, the loop raises the error again
            log.debug("not compiled: %s", error)
            return None
        finally:
            self.runner.classifier_input = None
        if not _depends_on_inputs_alone(traced):
            return None
        cuda = self.runner.device.type == "cuda"
        # On a GPU PyTorch records CUDA graphs. On a CPU this process compiles: PyTorch's pool would outlive the run.
        how: dict[str, Any] = {"mode": "reduce-overhead"} if cuda else {"options": {"compile_threads": 1}}
        how = {} if self.backend != "inductor" else how
        compiled = torch.compile(traced, fullgraph=True, dynamic=None, backend=self.backend, **how)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled(*_with_dynamic_columns(inputs))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            log.warning(
                "Training steps are not compiled (%s: %s). A C++ compiler is needed, such as g++.",
                type(error).__name__,
                str(error).strip().partition("\n")[0],
            )
            self._graphs = dict.fromkeys(self._graphs)
            self.num_steps = 0
            return None
        return cast(Graph, compiled)


class CompiledStepper(SGDStepper):
    """Takes steps of SGD, several at once."""

    def __init__(
        self,
        compiler: TorchCompiler,
        job: TrainJob,
        runner: ModelRunner,
        weights: Mapping[str, Tensor],
        forward: Callable[[Tensor], Tensor],
        training: Training,
        lr: float,
    ) -> None:
        super().__init__(runner, weights, forward, training, lr)
        self.compiler = compiler
        self.job = job
        network = runner.train_network
        self.names = [name for name, weight in weights.items() if weight.requires_grad]
        self.frozen = {name: weight for name, weight in weights.items() if not weight.requires_grad}
        self.buffers = dict(network.named_buffers())
        tensors = tree_tensors(job.loss)
        self.constants = [tensor for tensor, _ in tensors]
        self.per_example = [per_example for _, per_example in tensors]
        self._sizes = [stream.batch_size or training.batch_size for stream in job.streams]
        self._found: list[Graph | None] = []  # the graph, looked up once: all full batches of a job have one form
        self._waiting: list[list[Batch]] = []

    def step(self, loss: Loss, batches: list[Batch], step_callback: StepCallback | None = None) -> None:
        waiting = self._waiting
        if [len(batch.index) for batch in batches] != self._sizes:  # the rest of a pass: every length would be a graph
            self.finish()
            super().step(loss, batches)
            return
        waiting.append(batches)
        if len(waiting) < self.compiler.num_steps:
            return
        if not self._found:
            self._found = [self.compiler.graph(self, waiting)]
        (graph,) = self._found
        if graph is not None:
            self._run(graph, waiting)
        else:
            self.finish()
        waiting.clear()

    def finish(self) -> None:
        for batches in self._waiting:
            super().step(self.job.loss, batches)
        self._waiting.clear()

    def signature(self, steps: Sequence[list[Batch]]) -> Hashable:
        """Return a hashable value that is equal for steps that one graph serves."""
        shapes = tuple((weight.shape, weight.stride()) for weight in self.weights.values())
        batches = tuple((batch.data["input"].shape, batch.data["input"].stride()) for batch in steps[0])
        return self.job.signature, shapes, batches

    def inputs(self, steps: Sequence[list[Batch]]) -> tuple[Any, ...]:
        """Return the inputs of the graph, lists of tensors: all that differs between clients and rounds."""
        columns = [(list(batch.data.values()), batch.index) for batches in steps for batch in batches]
        data = [column for values, _ in columns for column in values] + [index for _, index in columns]
        fixed = [tensor for tensor, varies in zip(self.constants, self.per_example, strict=True) if not varies]
        rows = [tensor for tensor, varies in zip(self.constants, self.per_example, strict=True) if varies]
        lr = torch.tensor(self.lr, device=self.runner.device)
        state = [*self.parameters, *self.momenta, *self.buffers.values()]
        return [tensor.detach() for tensor in state], list(self.frozen.values()), data, fixed, rows, lr

    def take_steps(
        self,
        state: list[Tensor],
        frozen: list[Tensor],
        data: list[Tensor],
        fixed: list[Tensor],
        rows: list[Tensor],
        lr: Tensor,
    ) -> list[Tensor]:
        """Take steps as `SGDStepper` does, without changing a tensor: what is traced.

        Returns: The new parameters, momenta and buffers, and the sum of the losses.
        """
        count, training = len(self.parameters), self.training
        parameters, momenta = state[:count], state[count : count + len(self.momenta)]
        buffers = dict(zip(self.buffers, (buffer.clone() for buffer in state[count + len(momenta) :]), strict=True))
        constants, of_examples = iter(fixed), iter(rows)
        loss = replace_tensors(
            self.job.loss, [next(of_examples if varies else constants) for varies in self.per_example]
        )
        total = torch.zeros((), device=self.runner.device)
        for batches in self._batches(data):
            parameters = [parameter.detach().requires_grad_() for parameter in parameters]
            weights = dict(zip(self.names, parameters, strict=True))
            whole = {**weights, **dict(zip(self.frozen, frozen, strict=True)), **buffers}
            view = NetworkView(self.runner, weights, partial(self._logits, whole))
            with torch.enable_grad():
                with autocast(training.precision, self.runner.device):
                    value = loss(view, batches)
                check_scalar(value, loss)
                gradients = torch.autograd.grad(value, parameters, allow_unused=True)
            used = [number for number, gradient in enumerate(gradients) if gradient is not None]
            changes = [gradients[number] for number in used]
            if training.max_grad_norm is not None:
                changes = clip_gradients(changes, training.max_grad_norm)
            parameters = [parameter.detach() for parameter in parameters]
            for number, change in zip(used, changes, strict=True):
                if training.weight_decay:
                    change = change + training.weight_decay * parameters[number]
                if training.momentum:
                    momenta[number] = change = training.momentum * momenta[number] + change
                parameters[number] = parameters[number] - lr * change
            total = total + value.detach()
        return [*parameters, *momenta, *buffers.values(), total]

    def _logits(self, tensors: Mapping[str, Tensor], images: Tensor) -> Tensor:
        logits: Tensor = functional_call(self.runner.train_network, dict(tensors), (images,))
        return logits

    def _batches(self, data: list[Tensor]) -> list[list[Batch]]:
        """Put the tensors of `inputs` into batches like those that wait."""
        columns = iter(data)
        values = [[{name: next(columns) for name in batch.data} for batch in batches] for batches in self._waiting]
        return [[Batch(one, next(columns)) for one in of_step] for of_step in values]

    def _run(self, graph: Graph, steps: Sequence[list[Batch]]) -> None:
        with torch.no_grad():
            *found, total = graph(*self.inputs(steps))
            torch._foreach_copy_([*self.parameters, *self.momenta, *self.buffers.values()], found)
            self.loss_sum += total


def _with_dynamic_columns(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tell PyTorch that the length of teachers' outputs differs from client to client."""
    for column in inputs[4]:
        torch._dynamo.maybe_mark_dynamic(column, 0)
    return inputs


def _depends_on_inputs_alone(graph: GraphModule) -> bool:
    """Tell whether a graph draws no random numbers, and contains no tensor that existed before it was traced."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return False
        if node.op == "get_attr" and any("lift_fresh" not in str(user.target) for user in node.users):
            return False
    return True


def steps_in_graph(examples: Sequence[int], batch_size: int) -> int:
    """Return how many steps a graph should contain: a divisor, nearly, of the full batches of a median client's pass.

    Returns: The number, from 1 to `MAX_STEPS`.
    """
    full = max(sorted(examples)[len(examples) // 2] // batch_size, 1)
    choices = range(min(MAX_STEPS, full), min(MAX_STEPS // 2, full) - 1, -1)
    return min(choices, key=lambda count: full % count)
