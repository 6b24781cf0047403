"""The user's own networks, from a Python function or from its name in a recipe."""

import copy
import hashlib
import importlib
import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from traceback import walk_tb
from types import ModuleType
from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fedkeep._utils import seeds
from fedkeep._utils.torch_state import plain_torch
from fedkeep.errors import ConfigError, did_you_mean, in_one_line
from fedkeep.models.base import Architecture, Network, Shape
from fedkeep.models.own_code import ADDRESS, describe, is_option, own_attributes
from fedkeep.models.trial_step import check_parts, constants_of, evaluated, give_logits, keep_constants, run_blank
from fedkeep.models.weights import tensor_hash
from fedkeep.options import NO_OPTION

log = logging.getLogger(__name__)

Factory: TypeAlias = Callable[[Shape, int], nn.Module]
FeatureFunction: TypeAlias = Callable[[Tensor], Tensor]

_BUILT: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
"""Trained parameters of all networks in use that users' functions built, by `id`."""
_PATH = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<attribute>[^\W\d]\w*(\.[^\W\d]\w*)*)")


@dataclass(frozen=True)
class Custom(Architecture):
    """A network that a user's function builds; made by `custom` and `from_path`.

    ``name``: ``package.module:function``, which says where the function is.
    ``factory``: Called with the shape (channels, height, width) and the number of classes.
    ``origin``: The function or class that was given; the network, if one was given.
    """

    name: str = field(metadata=NO_OPTION)  # type: ignore[misc]  # of the instance, not of the class
    factory: Factory = field(repr=False, compare=False, metadata=NO_OPTION)
    origin: Any = field(repr=False, metadata=NO_OPTION)

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """Build the network, and try it with a batch of made-up inputs.

        ``shape``: Channels, height and width of an image.
        """
        with plain_torch():
            network = self._made(shape, classes)
            if not isinstance(network, nn.Module):
                raise ConfigError(f"{self.name} returned {_kind(network)} instead of a torch.nn.Module.")
            self._check_new(network)
            keep_constants(network)
            check_parts(network, self.name)
            network.register_forward_hook(give_logits)
            device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
            count = 2 * math.prod(shape)  # constant images have no deviation to divide by
            numbers = torch.arange(count, device=device).view(2, *shape)
            tried = [numbers / count, torch.zeros_like(numbers, dtype=torch.float32)]
            if len(shape) == 1:  # or they are token ids
                tried += [numbers % 2, torch.zeros_like(numbers)]
            reads_ids = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in network.modules())
            errors: list[ConfigError] = []
            for blank in tried:
                try:
                    run_blank(network, blank, classes, self.name)  # gives lazy layers their shapes
                except ConfigError as error:
                    errors.append(error)
                else:
                    return _split_at_last_linear(network, blank)
            raise errors[2 if reads_ids and len(errors) > 2 else 0]

    def _made(self, shape: Shape, classes: int) -> nn.Module:
        """Return what the user's function builds; an error in it comes through as it is."""
        try:
            return self.factory(shape, classes)
        except Exception as error:
            of_torch = str(getattr(self.origin, "__module__", "")).startswith("torch.")
            if isinstance(error, ConfigError) or not (of_torch or _takes_other_numbers(self.origin, error)):
                raise
            raise ConfigError(
                f"{self.name} builds no network for inputs of shape {tuple(shape)} and {classes} classes: "
                f"{type(error).__name__}: {in_one_line(error, 200)}. It was called with these two. Give a function "
                "(shape, classes) -> torch.nn.Module, or the network itself, such as Net(width=64)."
            ) from error

    def _check_new(self, network: nn.Module) -> None:
        """Raise `ConfigError` for a network, or a part that is trained, which a network in use has already.

        One and the same would be trained and evaluated at once, and each seed would begin where the last one ended.
        """
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        if any(_BUILT.get(id(parameter)) is parameter for parameter in trained):
            raise ConfigError(
                f"{self.name} returned a {type(network).__name__} that it has returned before, or that shares trained "
                "parameters with one. It must build a new network each time; or give the network itself as the model, "
                "which is copied."
            )
        _BUILT.update({id(parameter): parameter for parameter in trained})
        for parameter in trained:
            if not nn.parameter.is_lazy(parameter):  # its memory may be the user's, as of Embedding.from_pretrained
                parameter.data = parameter.data.clone()


def custom(factory: Factory | Callable[[], nn.Module] | nn.Module, name: str | None = None) -> Architecture:
    """Return an architecture that builds its network with a user's function.

    Any network can be trained. Methods that read features, and classes that arrive in tasks, need its two parts: it has
    them itself (see `split_classifier`), or it ends in a `torch.nn.Linear` that gives the logits.

    ``factory``: A function or class, called with the shape of an input, such as (channels, height, width), and the
        number of classes; one that needs no arguments, and has none with these names, is called without. It is called
        several times in a run, and must return a new network of the same form each time. A network is copied, and every
        seed begins with its weights.
    ``name``: The name for reports and recipes; by default ``package.module:function``, as `from_path` expects it.
    """
    if isinstance(factory, nn.Module):
        return Custom(name or f"{_name(type(factory))}()", lambda shape, classes: _copied(factory), factory)
    name = name or _name(factory)
    if not callable(factory):
        raise ConfigError(f"expected a function (shape, classes) -> torch.nn.Module, not {_kind(factory)}.")
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some functions that are not written in Python have no signature
        return Custom(name, cast(Factory, factory), factory)
    with suppress(TypeError):  # it takes arguments
        signature.bind()
        if not {"shape", "classes"} & signature.parameters.keys():
            plain = cast(Callable[[], nn.Module], factory)
            return Custom(name, lambda shape, classes: plain(), factory)
    try:
        signature.bind((1, 28, 28), 10)
    except TypeError as error:
        raise ConfigError(
            f"{name} cannot be called as function(shape, classes), with the shape of an input such as (channels, "
            f"height, width), nor without arguments: {error}. Give such a function or class, or wrap yours, as in "
            "lambda: Net(width=64)."
        ) from None
    return Custom(name, cast(Factory, factory), factory)


def _takes_other_numbers(function: Any, error: Exception) -> bool:
    """Tell whether PyTorch itself refuses what a function got for arguments such as in_channels."""
    innermost = [frame for frame, _ in walk_tb(error.__traceback__)][-1]
    if not str(innermost.f_globals.get("__name__")).startswith("torch."):
        return False
    with suppress(TypeError, ValueError):
        first = next(iter(inspect.signature(function).parameters), "")
        return not isinstance(function, nn.Module) and bool(first) and "shape" not in first
    return False


def _copied(network: nn.Module) -> nn.Module:
    """Return a copy of a network, so that all begin with its weights, whatever the seed."""
    try:
        return copy.deepcopy(network)
    except Exception as error:
        raise ConfigError(
            f"the network {type(network).__name__} was given as an object and cannot be copied for each seed "
            f"({in_one_line(error, 120)}). Give what builds it, such as model=lambda: Net(); of the old "
            "torch.nn.utils.weight_norm there is torch.nn.utils.parametrizations.weight_norm."
        ) from error


def describe_network(model: Architecture, shape: Shape, classes: int) -> dict[str, Any]:
    """Describe a user's network, so that a resumed run notices another one.

    Its digest depends on the layers, the names and shapes of the tensors, the source code of the user's classes as far
    as Python knows it (not on comments and layout) and the globals that it reads, their numbers and texts, and the
    weights of a network that was given as an object.

    Returns: Shape, number of classes, and the digest; empty for an architecture of FedKeep.
    """
    if not isinstance(model, Custom):
        return {}
    with seeds.temporary_seed(0):  # lazy layers begin with random weights
        network = model.build(shape, classes)
    tensors = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in network.state_dict().items()]
    classes_of = {type(one) for one in network.modules()}
    own = [cls for cls in classes_of if not cls.__module__.startswith(("torch.", "fedkeep."))]
    sources = sorted(repr(describe(cls)) for cls in own)
    options = [  # of PyTorch's layers too: not all are in their text, such as the number of heads
        {name: one for name, one in own_attributes(module).items() if is_option(one)} for module in network.modules()
    ]
    parts = ADDRESS.sub("", repr(network)), tensors, sources, describe(options)
    hashed = hashlib.sha256(repr(parts).encode())
    if isinstance(model.origin, nn.Module):
        constants = constants_of(network)
        for tensor in (*network.state_dict().values(), *constants.values()):
            hashed.update(tensor_hash(tensor).encode())
    return {"shape": list(shape), "classes": classes, "digest": hashed.hexdigest()[:16]}


def describe_code(model: Architecture, shape: Shape, classes: int) -> dict[str, Any]:
    """Return `describe_network` without the weights of a network that was given as an object."""
    return describe_network(replace(model, origin=None) if isinstance(model, Custom) else model, shape, classes)


def warn_of_other_network(model: Architecture, trained: Any, of: str) -> None:
    """Say that a network with trained weights is another one than was trained, as far as its code tells.

    ``trained``: What `describe_code` said of it; None if that is not known.
    ``of``: Whose weights these are.
    """
    if not trained or not isinstance(model, Custom):
        return
    if describe_code(model, tuple(trained["shape"]), trained["classes"]) != trained:
        log.warning(
            "%s has other code or numbers than the network that was trained, whose weights %s has. If it computes "
            "something else, its predictions are wrong.",
            model.name,
            of,
        )


def from_path(path: str, allow_code: bool) -> Architecture:
    """Import a function that a recipe names, and return an architecture that builds its network with it.

    ``path``: ``package.module:function``; the module is imported as by Python's ``import``.
    ``allow_code``: Whether the recipe's author is trusted, since importing a module runs it.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        raise ConfigError(
            f"cannot import a model by {path!r}: write package.module:function. What is defined inside a function, a "
            f"lambda and a network itself have no such name. {_GIVEN_HINT}"
        )
    if match["module"] == "__main__" and not hasattr(sys.modules["__main__"], match["attribute"].partition(".")[0]):
        raise ConfigError(f"the model {path!r} is one of another program, and cannot be imported. {_GIVEN_HINT}")
    if not allow_code:
        raise ConfigError(
            f"this recipe wants to import and run code of its own, {path!r}, for its model. If you trust it, allow it: "
            "--allow-code on the command line, machine=Machine(allow_code=True) in Python. Or give the model itself in "
            "Python: model=... to run or resume, network=... where a model is loaded, exported or predicts."
        )
    value: Any = _imported(match["module"], path)
    for part in match["attribute"].split("."):
        if not hasattr(value, part):
            parent = f"module {value.__name__!r}" if isinstance(value, ModuleType) else f"{value!r}"
            known = [name for name in vars(value) if not name.startswith("_")] if hasattr(value, "__dict__") else []
            hint = did_you_mean(part, [name for name in known if callable(getattr(value, name))])
            raise ConfigError(f"cannot import the model {path!r}: {parent} has no {part!r}.{hint}")
        value = getattr(value, part)
    if not callable(value):
        raise ConfigError(f"model {path!r} is {_kind(value)}. Expected a function (shape, classes) -> torch.nn.Module.")
    return custom(value, path)


def split_classifier(network: nn.Module) -> tuple[FeatureFunction, nn.Linear]:
    """Return the two parts of a network.

    Every `Network` has them. Any other module has them if it has a method ``features`` and a `torch.nn.Linear` with the
    name ``classifier``. Its author must make sure that ``forward`` is one after the other.

    Returns: A function from images to features, [b, width]. It raises `ConfigError` if the features do not fit the
        classifier.
    """
    if isinstance(network, Network):
        return network.features, network.classifier
    kind = type(network).__name__
    features, classifier = getattr(network, "features", None), getattr(network, "classifier", None)
    if not callable(features) or not isinstance(classifier, nn.Linear):
        missing = "no features(images)" if not callable(features) else "no classifier that is a torch.nn.Linear"
        raise ConfigError(f"features are needed here, and {kind} has {missing}. {_SPLIT_HINT}")
    width = classifier.in_features

    def checked(images: Tensor) -> Tensor:
        outputs: Tensor = features(images)
        if outputs.shape != (len(images), width):
            raise ConfigError(
                f"features(images) of {kind} gives shape {list(outputs.shape)} for {len(images)} images, and its "
                f"classifier reads [{len(images)}, {width}]. {_SPLIT_HINT}"
            )
        return outputs

    return checked, classifier


class SplitNetwork(Network):
    """A user's network whose last layer, a `torch.nn.Linear`, stands beside the rest."""

    def __init__(self, body: nn.Module, classifier: nn.Linear, classifier_names: Sequence[str]) -> None:
        nn.Module.__init__(self)  # no new classifier is drawn
        self.body = body
        self.classifier = classifier
        self.classifier_name, *others = classifier_names
        if others:  # an attribute more would make other networks of those that runs began with
            self.other_names = others

    def own_name(self, name: str) -> str:
        """Return the name of a tensor in the user's network."""
        return self.own_names(name)[0]

    def own_names(self, name: str) -> list[str]:
        """Return all names of a tensor in the user's network: a container of its last layer may have two."""
        part, _, rest = name.partition(".")
        owners = [self.classifier_name, *getattr(self, "other_names", ())]
        return [rest] if part == "body" else [f"{owner}.{rest}" for owner in owners]


class _InParts(nn.Module):
    """Computes a network's classifier on its features."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Any:
        return self.network.classifier(self.network.features(images))


def _consists_of_parts(network: nn.Module, blank: Tensor) -> bool:
    """Tell whether a network is a classifier on features; its author may give these names to others too."""
    if callable(getattr(network, "features", None)) and isinstance(getattr(network, "classifier", None), nn.Linear):
        with suppress(Exception):
            return torch.allclose(evaluated(network, blank), evaluated(_InParts(network), blank), equal_nan=True)
    return False


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _split_at_last_linear(network: nn.Module, blank: Tensor) -> nn.Module:
    """Return a network with features and a classifier; the network itself if it consists of them, or cannot be split.

    It can be if its logits are the output of one linear layer, which is used once and shares its weights with no other.
    """
    if _consists_of_parts(network, blank):
        return network
    calls: list[tuple[str, Tensor, int]] = []  # a layer, its output, and how often that had been changed in place
    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    hooks = [
        layer.register_forward_hook(
            lambda layer, given, output, name=name: calls.append((name, output, output._version))
        )
        for name, layer in layers.items()
    ]
    last: list[str] = []
    outputs: list[Tensor] = []
    try:
        for training in (False, True):
            calls.clear()
            with suppress(Exception) if training else nullcontext():  # `try_training` tells what fails in training
                outputs.append(evaluated(network, blank, training=training))
                ends = [name for name, output, version in calls if output is outputs[-1] and output._version == version]
                last.append(ends[0] if ends and [name for name, *_ in calls].count(ends[0]) == 1 else "")
    finally:
        for hook in hooks:
            hook.remove()
    if not last[0] or last[-1] != last[0]:
        return network
    parent, _, attribute = last[0].rpartition(".")
    classifier = layers[last[0]]
    if not {name for name, _ in classifier.named_parameters()} <= {"weight", "bias"}:
        return network  # its weight is computed from others
    holder = network.get_submodule(parent)
    names = [name for name, layer in network.named_modules(remove_duplicate=False) if layer is classifier]
    setattr(holder, attribute, nn.Identity())
    split = SplitNetwork(network, classifier, names)
    with suppress(Exception):  # a network may read its last layer in another way than by calling it
        shared = {id(weight) for weight in network.parameters()} & {id(weight) for weight in classifier.parameters()}
        again = [evaluated(split, blank, training=training) for training in (False, True)[: len(outputs)]]
        if not shared and all(map(_equal, again, outputs)):
            return split
    setattr(holder, attribute, classifier)
    return network


_GIVEN_HINT = (
    "Give the network that the run was begun with: resume(RUN, model=...), or network=... where a model is loaded, "
    "exported or predicts."
)
_SPLIT_HINT = (
    "End the network in a torch.nn.Linear whose output is the logits, and it is split there; or give the module a "
    "method features(images) that returns [batch, width] and a classifier, torch.nn.Linear(width, classes), with "
    "forward(images) = classifier(features(images))."
)


def _imported(module: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"cannot import the model {path!r}: {module} itself needs {error.name!r}.") from error
        raise ConfigError(
            f"cannot import the model {path!r}: there is no module {error.name!r}. Install it, or name its folder in "
            "the environment variable PYTHONPATH (PYTHONPATH=. for this one)."
        ) from None
    except Exception as error:
        # The user's code may fail in any way while it is imported.
        raise ConfigError(f"cannot import the model {path!r}: {type(error).__name__}: {error}") from error


def _name(factory: Any) -> str:
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", None)
    if name is None:  # such as functools.partial, whose __module__ is that of its class
        return f"<{type(factory).__name__}>"
    return f"{module}:{name}"


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
