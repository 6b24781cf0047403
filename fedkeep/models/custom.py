"""Networks of the user's own, from a function in Python or by its name in a recipe."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fedkeep.errors import ConfigError, did_you_mean
from fedkeep.models.base import Architecture, Network, Shape

Factory: TypeAlias = Callable[[Shape, int], nn.Module]
FeatureFunction: TypeAlias = Callable[[Tensor], Tensor]

_PATH = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<attribute>[^\W\d]\w*(\.[^\W\d]\w*)*)")


@dataclass(frozen=True)
class Custom(Architecture):
    """A network that a function of the user's builds; made by `custom` and `from_path`.

    Attributes
    ----------
    name : ``package.module:function``, where the function can be found again.
    factory : called with shape (channels, height, width) and the number of classes.
    """

    name: str  # type: ignore[misc]  # of the instance: there are as many as users
    factory: Factory = field(repr=False)

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """Return the factory's network, after one batch of blank images has gone through it.

        Raises
        ------
        ConfigError
            If it is no `torch.nn.Module`, does not give [b, classes] logits for such images, has nothing to train, or
            keeps other tensors than float32 and integers.
        """
        network = self.factory(shape, classes)
        if not isinstance(network, nn.Module):
            raise ConfigError(f"{self.name} returned {_kind(network)} instead of a torch.nn.Module.")
        # First of all, because lazy layers get their shapes from it.
        self._check_logits(network, shape, classes)
        if next(network.parameters(), None) is None:
            raise ConfigError(f"{self.name} returned a {type(network).__name__} without parameters: nothing to train.")
        for name, tensor in network.state_dict().items():
            if isinstance(tensor, Tensor) and tensor.dtype != torch.float32 and _is_inexact(tensor):
                raise ConfigError(
                    f"{self.name} returned a network whose {name!r} is {str(tensor.dtype).removeprefix('torch.')}. "
                    "Weights are float32 and other buffers integers here; call .float() on the network."
                )
        return network

    def _check_logits(self, network: nn.Module, shape: Shape, classes: int) -> None:
        device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
        size = "x".join(map(str, shape))
        try:
            logits = _evaluated(network, torch.zeros(2, *shape, device=device))
        except Exception as error:
            raise ConfigError(f"the network of {self.name} fails on images of {size}: {error}") from error
        if not isinstance(logits, Tensor):
            raise ConfigError(f"the network of {self.name} gives {_kind(logits)} instead of a tensor of logits.")
        if logits.shape != (2, classes):
            raise ConfigError(
                f"the network of {self.name} gives outputs of shape {list(logits.shape)} for 2 images of {size} and "
                f"{classes} classes. Expected [2, {classes}]: one logit a class."
            )


def custom(factory: Factory, name: str | None = None) -> Architecture:
    """Return an architecture that builds its network with a function of one's own.

    A network of any form trains. To be used by methods that read features, it must be splittable; see
    `split_classifier`.

    Parameters
    ----------
    factory : called with shape (channels, height, width) and the number of classes; a class will do. It is called
        several times in a run and must return a new network of the same form each time.
    name : for reports and recipes; by default ``package.module:function``, as `from_path` takes it.

    Raises
    ------
    ConfigError
        If it cannot be called so.
    """
    if isinstance(factory, nn.Module):
        raise ConfigError(
            f"expected a function that makes a network, not a network (a {type(factory).__name__}): every party builds "
            "its own. Give the function or the class, called with shape and classes."
        )
    name = name or _name(factory)
    if not callable(factory):
        raise ConfigError(f"expected a function (shape, classes) -> torch.nn.Module, not {_kind(factory)}.")
    try:
        inspect.signature(factory).bind((1, 28, 28), 10)
    except TypeError as error:
        raise ConfigError(
            f"{name} cannot be called as function(shape, classes), with shape (channels, height, width): {error}."
        ) from None
    except ValueError:  # some functions that are not written in Python do not say what they take
        return Custom(name, factory)
    return Custom(name, factory)


def from_path(path: str, allow_code: bool) -> Architecture:
    """Import the function that a recipe names, and return it as an architecture.

    Parameters
    ----------
    path : ``package.module:function``; the module is found as by Python's own import.
    allow_code : whether the recipe's author is trusted: importing a module runs it.

    Raises
    ------
    ConfigError
        If it is not allowed, not of this form, or not found, or is not a function of shape and classes.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        raise ConfigError(
            f"cannot import a model by {path!r}: write package.module:function. What is defined inside a function, and "
            "a lambda, has no such name."
        )
    if not allow_code:
        raise ConfigError(
            f"this recipe wants to import and run code of its own, {path!r}, for its model. If you trust it, allow it: "
            "--allow-code on the command line, machine=Machine(allow_code=True) in Python."
        )
    value: Any = _imported(match["module"], path)
    for part in match["attribute"].split("."):
        if not hasattr(value, part):
            owner = f"module {value.__name__!r}" if isinstance(value, ModuleType) else f"{value!r}"
            known = [name for name in vars(value) if not name.startswith("_")] if hasattr(value, "__dict__") else []
            hint = did_you_mean(part, [name for name in known if callable(getattr(value, name))])
            raise ConfigError(f"cannot import the model {path!r}: {owner} has no {part!r}.{hint}")
        value = getattr(value, part)
    if not callable(value):
        raise ConfigError(
            f"the model {path!r} is {_kind(value)}. Expected a function (shape, classes) -> torch.nn.Module."
        )
    return custom(value, path)


def split_classifier(network: nn.Module) -> tuple[FeatureFunction, nn.Linear]:
    """Return a network's two parts: the function from images to features [b, width], and its linear classifier.

    Every `Network` has them. Any other module has them if it offers a callable ``features`` and a `torch.nn.Linear`
    named ``classifier``; that its ``forward`` is one after the other is up to its author.

    Raises
    ------
    ConfigError
        If the module does not offer them. The function raises it if what it gives does not fit the classifier.
    """
    if isinstance(network, Network):
        return network.features, network.classifier
    kind = type(network).__name__
    features, classifier = getattr(network, "features", None), getattr(network, "classifier", None)
    if not callable(features) or not isinstance(classifier, nn.Linear):
        lack = "no features(images)" if not callable(features) else "no classifier that is a torch.nn.Linear"
        raise ConfigError(f"features are needed here, and {kind} has {lack}. {_OFFER}")
    width = classifier.in_features

    def checked(images: Tensor) -> Tensor:
        found: Tensor = features(images)
        if found.shape != (len(images), width):
            raise ConfigError(
                f"features(images) of {kind} gives shape {list(found.shape)} for {len(images)} images, and its "
                f"classifier reads [{len(images)}, {width}]. {_OFFER}"
            )
        return found

    return checked, classifier


_OFFER = (
    "Give the module a method features(images) that returns [batch, width] and a classifier, torch.nn.Linear(width, "
    "classes), with forward(images) = classifier(features(images))."
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


def _evaluated(network: nn.Module, images: Tensor) -> Any:
    """Return what a network gives in evaluation mode, and leave every layer in the mode it was in."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad():
            return network(images)
    finally:
        for module, training in modes:
            module.training = training


def _name(factory: Any) -> str:
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", None)
    if name is None:  # such as functools.partial, whose __module__ is that of its class
        return f"<{type(factory).__name__}>"
    return f"{module}:{name}"


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
