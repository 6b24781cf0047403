"""The network on one device: one module that is trained, and one that evaluates frozen models."""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedkeep._utils import seeds
from fedkeep.errors import ConfigError
from fedkeep.losses.decoupled import upcast
from fedkeep.models import Network, Weights
from fedkeep.models.custom import SplitNetwork, split_classifier
from fedkeep.models.heads import add_views, expand_rows, resize_classifier
from fedkeep.models.pretrained import Extractor, FrozenNetwork
from fedkeep.models.weights import frozen_parameters, state_dict_copy
from fedkeep.training.cuda_graph import CapturedSteps

Factory = Callable[[], nn.Module]
WEIGHTS_PER_IMAGE = 1_000_000
"""So many weights for each image of a batch make the contiguous layout the faster one on a CPU."""
BATCH = 1024  # images in a forward pass without gradient; more do not fit into the cache of small machines
CONV_BATCH = 128  # with convolutions on a CPU, where larger maps are allocated anew every time (benchmarks/answers.md)

IN_PLACE = "{} changed examples in place, and others read them too. Compute new tensors: x * 2 instead of x.mul_(2)."


class _Features(nn.Module):
    """Maps images to the input of the classifier; a module, so that it can be called with any weights."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return split_classifier(self.network)[0](images)


class ModelRunner:
    """Builds the network and runs it with any weights.

    Two modules are built once and filled with weights as needed, instead of one module for each client. So memory does
    not grow with the cohort.

    ``factory``: Builds the network, with a classifier row for each class of the first task.
    ``rows_per_class``: Classifier rows for each class. The factory builds the first of them.
    ``initial``: The initial weights, with one classifier row for each class; by default those that the factory gives.
    ``batch_size``: Images in a training step, on which the memory layout depends.
    ``train_network``: The network that is trained.
    ``eval_network``: The network that evaluates frozen models.
    ``initial``: The initial weights, with classifier rows for all classes of the current task.
    ``parameters``: Names of the trained weights.
    ``layout``: Memory layout of image batches in training.
    ``eval_batch_size``: Number of images in a forward pass without gradient.
    ``classifier_input``: The last input of the training network's classifier.
    ``captured``: Steps of the training network captured on a GPU, by what they have in common.
    """

    def __init__(
        self,
        factory: Factory,
        seed: int,
        device: torch.device,
        rows_per_class: int = 1,
        initial: Weights | None = None,
        batch_size: int = 64,
    ) -> None:
        self.factory = factory
        self.seed = seed
        self.device = device
        self.rows_per_class = rows_per_class
        # The factory can only use PyTorch's default generator for the initial weights, so that is seeded meanwhile.
        with seeds.temporary_seed(seeds.derive(seed, "initial weights")):
            built = factory()
        self._initial_of_task_one: Weights = state_dict_copy(built.to(device))
        self.frozen = frozen_parameters(built)
        if initial is not None:
            for name, tensor in self.frozen.items():
                tensor.copy_(initial[name])
            self._initial_of_task_one = {name: initial[name].to(own) for name, own in self._initial_of_task_one.items()}
        if rows_per_class > 1:
            if isinstance(built, FrozenNetwork):
                raise ConfigError(
                    "a method that rotates images cannot learn from a frozen extractor. Use another model."
                )
            self._initial_of_task_one = add_views(
                self._initial_of_task_one, rows_per_class, seeds.rng(seed, "further rows")
            )
            resize_classifier(built, self._initial_of_task_one)
        self.initial: Weights = self._initial_of_task_one
        names = [name for name, _ in built.named_parameters(remove_duplicate=False)]
        self.parameters = tuple(name for name in names if name in self.initial)
        # With channels last a CPU trains LeNet-5 1.1 and CNN-4 1.2 times as fast, AlexNet-8 and ResNet-18 as fast
        # (benchmarks/steps.md). Where weights are many and images few, ordering the weights costs more: ResNet-18
        # takes 1.4 times as long for a step with two images, 1.2 with eight.
        # A user's module may use views that need the contiguous layout, so it keeps that.
        convolutions = any(isinstance(module, nn.Conv2d) for module in built.modules())
        few_images = sum(weight.numel() for weight in built.parameters()) > WEIGHTS_PER_IMAGE * batch_size
        channels_last = _is_ours(built) and convolutions and device.type == "cpu" and not few_images
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.train_network = built.to(memory_format=self.layout) if channels_last else built  # type: ignore[call-overload]
        self.eval_batch_size = CONV_BATCH if convolutions and device.type == "cpu" else BATCH
        self.classifier_input: Tensor | None = None
        classifier = getattr(built, "classifier", None)
        if isinstance(classifier, nn.Linear):
            classifier.register_forward_pre_hook(self._keep_input)
        self.captured: dict[Hashable, CapturedSteps] = {}
        self.eval_network = self.build()

    @property
    def extractor(self) -> Extractor | None:
        """The frozen feature extractor of a network that trains only its classifier; None for all others."""
        return self.train_network.extractor if isinstance(self.train_network, FrozenNetwork) else None

    @cached_property
    def has_batch_norm(self) -> bool:
        """Whether the network contains batch norm."""
        return has_batch_norm(self.train_network)

    @property
    def stackable(self) -> bool:
        """Whether several clients can be trained as one stacked model."""
        built = self.train_network
        all_trained = all(weight.requires_grad for weight in built.parameters()) and not list(built.buffers())
        # vmap gives the vector of padding_idx a gradient; a user's module may keep a state between calls.
        pads = any(isinstance(m, nn.Embedding) and m.padding_idx is not None for m in built.modules())
        return _is_ours(built) and all_trained and not pads

    def set_task(self, seen: Sequence[int]) -> None:
        """Resize the classifiers for a task.

        New rows depend only on the seed and the task, so that they are the same for everyone.

        ``seen``: Number of classes seen with each task so far, in all; the last is the task to go to.
        """
        self.initial = self._initial_of_task_one
        for task, classes in enumerate(seen[1:], start=2):
            rng = seeds.rng(self.seed, "new classes", task=task)
            self.initial = expand_rows(self.initial, self.rows_per_class * classes, rng)
        for network in (self.train_network, self.eval_network):
            resize_classifier(network, self.initial)
        self.captured.clear()  # they train the weights that the classifier had

    def build(self, like: Weights | None = None) -> nn.Module:
        """Build another network, whose weights are arbitrary.

        ``like``: A model that has as many classifier rows as the network shall have; by default as many as in the first
            task.
        """
        with seeds.temporary_seed(0):
            network = self.factory().to(self.device).eval()
        for name, tensor in frozen_parameters(network).items():
            tensor.copy_(self.frozen[name])
        resize_classifier(network, like or self._initial_of_task_one)
        return network

    def logits(self, model: Weights, images: Tensor) -> Tensor:
        """Compute a model's logits in evaluation mode, without gradient.

        ``images``: Normalised images, float32 [n, channels, height, width].
        Returns: Logits, float32 [n, rows].
        """
        return self._run(
            lambda part: functional_call(self.eval_network, dict(model), (part,), tie_weights=False), images
        )

    def features(self, model: Weights, images: Tensor) -> Tensor:
        """Compute the input of a model's classifier in evaluation mode, without gradient.

        ``images``: Normalised images, float32 [n, channels, height, width].
        Returns: Features, float32 [n, width].
        """
        features = _Features(self.eval_network)
        weights = {f"network.{name}": tensor for name, tensor in model.items()}
        return self._run(lambda part: functional_call(features, weights, (part,), tie_weights=False), images)

    def _keep_input(self, classifier: nn.Module, inputs: tuple[Tensor]) -> None:
        self.classifier_input = inputs[0]

    def _run(self, function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        version = images._version
        with torch.no_grad():
            parts = [upcast(function(part.to(self.device))) for part in torch.split(images, self.eval_batch_size)]
        if images._version != version:
            raise ConfigError(IN_PLACE.format("the network"))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def _is_ours(network: nn.Module) -> bool:
    """Tell whether a network is FedKeep's, and not a user's."""
    own = (module for module in network.modules() if not type(module).__module__.startswith(("torch.", "fedkeep.")))
    return isinstance(network, Network) and not isinstance(network, SplitNetwork) and next(own, None) is None


def has_batch_norm(network: nn.Module) -> bool:
    """Tell whether a network contains batch norm, which normalises over the examples of a batch; group norm does not.

    Returns: True if any of its layers is a batch norm.
    """
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())


def check_batch_size(network: nn.Module, size: int, option: str = "training.batch_size") -> None:
    """Check that batch norm gets batches of more than one example."""
    if size == 1 and has_batch_norm(network):
        raise ConfigError(
            f"batch norm needs at least two examples in a batch, and {option} is 1. Set it to 2 or more, or "
            "use a model without batch norm, such as resnet18 with norm=group."
        )
