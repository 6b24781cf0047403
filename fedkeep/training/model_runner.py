"""The recipe's network on one device: one copy that is trained, and one that evaluates frozen models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedkeep._utils import seeds
from fedkeep.errors import ConfigError
from fedkeep.interface import Training
from fedkeep.losses.decoupled import upcast
from fedkeep.models import Network, Weights
from fedkeep.models.custom import split_classifier
from fedkeep.models.heads import WEIGHT, add_views, expand_rows
from fedkeep.models.pretrained import FrozenNetwork
from fedkeep.models.weights import state_dict_copy

Factory = Callable[[], nn.Module]
BATCH = 1024  # rows per forward pass without gradient; larger ones fall out of the cache of small machines
CONV_BATCH = 128  # with convolutions on a CPU, whose larger maps are handed out anew every time (benchmarks/answers.md)


class _Features(nn.Module):
    """Maps images to the classifier's input, as a module, so that it can run with any weights."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return split_classifier(self.network)[0](images)


class ModelRunner:
    """Builds the recipe's network and runs it for any weights.

    Two modules are built once and refilled, instead of one per client: memory does not grow with the cohort.

    Parameters
    ----------
    factory : Callable[[], nn.Module]
        Builds the network, with a row of the classifier for each class of the first task.
    seed : int
        Of the initial weights.
    device : torch.device
        Where the network computes.
    rows : int
        Rows of the classifier for each class; if several, the first is the one that the factory built.

    Attributes
    ----------
    train_network : nn.Module
        The network that is trained.
    eval_network : nn.Module
        The network that evaluates frozen models.
    initial : Weights
        The initial weights, with as many rows of the classifier as the current task has.
    parameters : tuple[str, ...]
        Names of the weights that are trained.
    extractor : Callable or None
        Reads images in place of a network that is frozen but for its classifier; None for all others.
    """

    def __init__(self, factory: Factory, seed: int, device: torch.device, rows: int = 1) -> None:
        self.factory = factory
        self.seed = seed
        self.device = device
        self.rows = rows
        # The factory draws initial weights from PyTorch's default generator, which is lent to it for the purpose.
        with seeds.temporary_seed(seeds.derive(seed, "initial weights")):
            built = factory()
        self.first: Weights = state_dict_copy(built.to(device))  # as of the first task
        self.extractor = built.extractor if isinstance(built, FrozenNetwork) else None
        if rows > 1:
            if self.extractor is not None:
                raise ConfigError("a method that turns images cannot learn from a frozen extractor. Use another model.")
            self.first = add_views(self.first, rows, seeds.generator(seed, "further rows"))
            _resize_head(built, self.first)
        self.initial: Weights = self.first
        names = [name for name, _ in built.named_parameters(remove_duplicate=False)]
        self.parameters = tuple(name for name in names if name in self.initial)
        # With channels last a CPU trains LeNet-5 1.1 and CNN-4 1.2 times as fast, AlexNet-8 and ResNet-18 as fast
        # (benchmarks/steps.md).
        # A module of the user's own may use views that only plain layout allows, so it keeps that.
        convolutions = any(isinstance(module, nn.Conv2d) for module in built.modules())
        last = isinstance(built, Network) and convolutions and device.type == "cpu"
        self.layout = torch.channels_last if last else torch.contiguous_format
        self.train_network = built.to(memory_format=self.layout) if last else built  # type: ignore[call-overload]
        self.eval_batch_size = CONV_BATCH if convolutions and device.type == "cpu" else BATCH
        self.classifier_input: Tensor | None = None  # what the classifier in training was last given
        classifier = getattr(built, "classifier", None)
        if isinstance(classifier, nn.Linear):
            classifier.register_forward_pre_hook(self._keep_input)
        self.eval_network = self.build()
        self.has_batch_norm = has_batch_norm(built)
        weights = built.parameters()
        plain = all(weight.requires_grad for weight in weights) and not any(True for _ in built.buffers())
        self.stackable = isinstance(built, Network) and plain  # a user's own module may keep anything between calls

    def set_task(self, seen: Sequence[int]) -> None:
        """Let the networks know as many classes as were seen with the last of some tasks, from the first on.

        New rows of the classifier depend on the seed and the task alone, so that all parties have the same.
        """
        self.initial = self.first
        for task, classes in enumerate(seen[1:], start=2):
            generator = seeds.generator(self.seed, "new classes", task=task)
            self.initial = expand_rows(self.initial, self.rows * classes, generator)
        for network in (self.train_network, self.eval_network):
            _resize_head(network, self.initial)

    def build(self, like: Weights | None = None) -> nn.Module:
        """Return another network, with weights of no meaning; its classifier has as many rows as a model's.

        Without a model, as many as it had first.
        """
        with seeds.temporary_seed(0):
            network = self.factory().to(self.device).eval()
        _resize_head(network, like or self.first)
        return network

    def logits(self, model: Weights, images: Tensor) -> Tensor:
        """Return a model's logits [n, rows] on normalised images, without gradient, in evaluation mode."""
        return self._run(
            lambda part: functional_call(self.eval_network, dict(model), (part,), tie_weights=False), images
        )

    def features(self, model: Weights, images: Tensor) -> Tensor:
        """Return what a model's classifier reads, [n, width], likewise."""
        features = _Features(self.eval_network)
        weights = {f"network.{name}": tensor for name, tensor in model.items()}
        return self._run(lambda part: functional_call(features, weights, (part,), tie_weights=False), images)

    def _keep_input(self, classifier: nn.Module, read: tuple[Tensor]) -> None:
        self.classifier_input = read[0]

    def _run(self, function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        with torch.no_grad():
            parts = [upcast(function(part.to(self.device))) for part in torch.split(images, self.eval_batch_size)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def _resize_head(network: nn.Module, model: Weights) -> None:
    """Let a network's classifier have as many rows as a model's; what is in them has no meaning."""
    head = getattr(network, "classifier", None)
    if not isinstance(head, nn.Linear) or WEIGHT not in model or head.out_features == len(model[WEIGHT]):
        return
    head.out_features = len(model[WEIGHT])
    head.weight = nn.Parameter(head.weight.new_zeros(head.out_features, head.in_features))
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias.new_zeros(head.out_features))


def has_batch_norm(network: nn.Module) -> bool:
    """Tell whether a network normalises over the examples of a batch, in any layer; group norm does not."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())


def check_batch_size(network: nn.Module, training: Training) -> None:
    """Raise `ConfigError` if every batch would be of one example, from which batch norm cannot learn."""
    if training.batch_size == 1 and has_batch_norm(network):
        raise ConfigError(
            "batch norm needs at least two examples in a batch, and training.batch_size is 1. Set it to 2 or more, or "
            "use a model without batch norm, such as resnet18 with norm=group."
        )
