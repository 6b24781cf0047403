"""The user's own networks, from a Python function or from its name in a recipe.

They are tried before they are used, with errors that speak of the network and the data.
"""

import copy
import functools
import hashlib
import importlib
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedkeep._utils import seeds
from fedkeep._utils.torch_state import plain_torch
from fedkeep.errors import ConfigError, did_you_mean, in_one_line
from fedkeep.models.base import Architecture, Network, Shape
from fedkeep.models.own_code import ADDRESS, describe, is_plain, own_attributes
from fedkeep.models.weights import dtype_name, tensor_hash
from fedkeep.options import NO_OPTION

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
        """Build the network, and try it with a batch of blank images.

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
            blank = torch.zeros(2, *shape, device=device)
            try:
                run_blank(network, blank, classes, self.name)  # gives lazy layers their shapes
            except ConfigError as error:
                if len(shape) != 1:
                    raise
                reads_ids = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in network.modules())
                try:
                    run_blank(network, blank := blank.long(), classes, self.name)
                except ConfigError as second:
                    raise (second if reads_ids else error) from None
            return _split_at_last_linear(network, blank)

    def _made(self, shape: Shape, classes: int) -> nn.Module:
        """Return what the user's function builds; an error in it comes through as it is."""
        try:
            return self.factory(shape, classes)
        except Exception as error:
            if isinstance(error, ConfigError) or not str(getattr(self.origin, "__module__", "")).startswith("torch."):
                raise
            raise ConfigError(
                f"{self.name} builds no network for inputs of shape {tuple(shape)} and {classes} classes: "
                f"{in_one_line(error, 200)}. Give a function (shape, classes) -> torch.nn.Module, or the network "
                "itself, such as Net(width=64)."
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
    modules = [one for one in network.modules() if not type(one).__module__.startswith(("torch.", "fedkeep."))]
    classes_of = {type(one) for one in modules}
    sources = sorted(repr(describe(cls)) for cls in classes_of)
    numbers = [{name: one for name, one in own_attributes(module).items() if is_plain(one)} for module in modules]
    parts = ADDRESS.sub("", repr(network)), tensors, sources, describe(numbers)
    hashed = hashlib.sha256(repr(parts).encode())
    if isinstance(model.origin, nn.Module):
        constants = constants_of(network)
        for tensor in (*network.state_dict().values(), *constants.values()):
            hashed.update(tensor_hash(tensor).encode())
    return {"shape": list(shape), "classes": classes, "digest": hashed.hexdigest()[:16]}


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
            "Python: model=..."
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

    def __init__(self, body: nn.Module, classifier: nn.Linear, classifier_name: str) -> None:
        nn.Module.__init__(self)  # no new classifier is drawn
        self.body = body
        self.classifier = classifier
        self.classifier_name = classifier_name

    def own_name(self, name: str) -> str:
        """Return the name of a tensor in the user's network."""
        part, _, rest = name.partition(".")
        return rest if part == "body" else f"{self.classifier_name}.{rest}"


def _split_at_last_linear(network: nn.Module, blank: Tensor) -> nn.Module:
    """Return a network with features and a classifier; the network itself if it has them, or cannot be split.

    It can be if its logits are the output of one linear layer, which is used once and shares its weights with no other.
    """
    if callable(getattr(network, "features", None)) and isinstance(getattr(network, "classifier", None), nn.Linear):
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
                ends = [name for name, given, version in calls if given is outputs[-1] and given._version == version]
                last.append(ends[0] if ends and [name for name, *_ in calls].count(ends[0]) == 1 else "")
    finally:
        for hook in hooks:
            hook.remove()
    if not last[0] or {*last} != {last[0]}:
        return network
    parent, _, attribute = last[0].rpartition(".")
    classifier = layers[last[0]]
    if not {name for name, _ in classifier.named_parameters()} <= {"weight", "bias"}:
        return network  # its weight is computed from others
    holder = network.get_submodule(parent)
    setattr(holder, attribute, nn.Identity())
    split = SplitNetwork(network, classifier, last[0])
    with suppress(Exception):  # a network may read its last layer in another way than by calling it
        shared = {id(weight) for weight in network.parameters()} & {id(weight) for weight in classifier.parameters()}
        again = [evaluated(split, blank, training=training) for training in (False, True)[: len(outputs)]]
        if not shared and all(map(torch.equal, again, outputs)):
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


Entered = tuple[str, nn.Module, Any]
"""A layer's name, the layer, and its first input."""


def logits_of(output: Any) -> Any:
    """Return the logits of a network's output: a tensor itself, or what it calls ``logits``; else the output."""
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return named if isinstance(named, Tensor) and not isinstance(output, Tensor) else output


def give_logits(network: nn.Module, inputs: Any, output: Any) -> Any:
    """Replace a network's output by its logits; a forward hook."""
    return logits_of(output)


def check_parts(network: nn.Module, who: str) -> None:
    """Raise `ConfigError` for a network that cannot be trained, averaged or sent, whatever the data are."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in network.modules()):
        raise ConfigError(
            f"the network of {who} is TorchScript, which cannot be run with other weights. Give the torch.nn.Module "
            "that was scripted or traced."
        )
    parameters = list(network.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        frozen = "whose parameters are all frozen (requires_grad=False)" if parameters else "without parameters"
        raise ConfigError(f"{who} returned a network, a {type(network).__name__}, {frozen}: nothing to train.")
    for name, tensor in network.state_dict().items():
        if not isinstance(tensor, Tensor) or nn.parameter.is_lazy(tensor):
            continue
        if tensor.is_meta:
            raise ConfigError(
                f"{who} returned a network whose {name!r} has no numbers: build it without device='meta'."
            )
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        if tensor.dtype != torch.float32:
            raise ConfigError(
                f"{who} returned a network whose {name!r} is {dtype_name(tensor)}. "
                "Weights are float32 and other buffers integers here; call .float() on the network."
            )
        if not tensor.isfinite().all():
            raise ConfigError(f"{who} returned a network whose {name!r} has numbers that are not finite.")


def keep_constants(network: nn.Module) -> None:
    """Take buffers that are not finite, such as a mask of -inf, out of the state dict: they cannot be averaged."""
    names = []
    for path, module in network.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            persistent = name not in module._non_persistent_buffers_set
            numbers = not nn.parameter.is_lazy(buffer) and not buffer.is_meta
            if persistent and numbers and not buffer.isfinite().all():
                module._non_persistent_buffers_set.add(name)
                names.append(f"{path}.{name}" if path else name)
    network.constant_buffers = tuple(names)  # type: ignore[assignment]


def constants_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that `keep_constants` took out, by their names in the user's network."""
    whole = network if hasattr(network, "constant_buffers") else getattr(network, "body", network)  # or it was split
    names: Any = getattr(whole, "constant_buffers", ())
    return {name: whole.get_buffer(name) for name in names}


def run_blank(network: nn.Module, inputs: Tensor, classes: int, who: str) -> Tensor:
    """Return the logits of inputs in evaluation mode; raise `ConfigError` if there are none of the right shape."""
    with _watched(network, inputs, f"the network of {who} fails on inputs of {_size(inputs)}"):
        output = evaluated(network, inputs)
    return _checked_logits(output, inputs, classes, who, "")


def try_training(network: nn.Module, inputs: Tensor, classes: int, who: str, *, batch_norm: bool) -> None:
    """Run a network as in evaluation and in training, with two examples and with one; raise `ConfigError` if it fails.

    ``inputs``: Two examples, as the network gets them.
    ``batch_norm``: Whether it has batch norm, whose training batches have at least two examples.
    """

    def global_generators() -> str:
        return repr((random.getstate(), np.random.get_state()))  # noqa: NPY002 — only read

    before = global_generators()
    for training, count in ((False, 2), (False, 1), (True, 2), (True, 1)):
        if not (training and count == 1 and batch_norm):
            _try(network.train(training), inputs[:count], classes, who)
    if global_generators() != before:
        raise ConfigError(
            f"the network of {who} draws random numbers from Python's or NumPy's global generator, which are others in "
            "each process. Draw them with torch, whose generator is seeded for each training."
        )
    first, _, again = (
        logits_of(evaluated(network, one, training=True)) for one in (inputs, torch.zeros_like(inputs), inputs)
    )
    if not torch.allclose(first, again, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise ConfigError(
            f"the network of {who} gives other outputs in training mode for the same examples, weights and seed after "
            "it has seen others: it keeps something that no state dict holds, in an attribute or in a buffer with "
            "persistent=False, which would go from client to client. Register it as a persistent buffer, or keep "
            "nothing."
        )


def _try(network: nn.Module, examples: Tensor, classes: int, who: str) -> None:
    """Take one step, whose update is not applied."""
    mode = " in training mode" if network.training else ""
    how = f"{len(examples)} example{'s' if len(examples) > 1 else ''} of {_size(examples)}{mode}"
    inputs = examples.clone()
    version = inputs._version
    own_name = getattr(network, "own_name", str)
    constants = constants_of(network)
    before = {name: tensor.clone() for name, tensor in _tensors(network).items()}
    with _watched(network, examples, f"the network of {who} fails on {how}"):
        output = network(inputs)
    if inputs._version != version or not torch.equal(inputs, examples):
        raise ConfigError(
            f"the network of {who} changes its inputs in place, and others read the same examples. Write x = x * 2 "
            "instead of x *= 2 or x.mul_(2), no inplace=True in the first layers, or begin with x = x.clone()."
        )
    logits = _checked_logits(output, examples, classes, who, mode)
    parameters = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    for name, tensor in _tensors(network).items():
        fixed = not network.training or name in parameters or name in constants
        if fixed and not torch.equal(tensor, before[name]):
            shown, hint = own_name(name), "Change it in training mode only"
            if name in constants:
                shown, hint = name, "Begin with finite numbers"
            elif name in parameters:
                hint = "Take Embedding's max_norm out"
            raise ConfigError(
                f"the network of {who} changes its own {shown!r} when it computes outputs{mode}, and "
                f"others read the same model. {hint}."
            )
    if network.training:
        _try_gradients(logits, parameters, who, how)


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return a network's tensors by name."""
    return {n: entry for n, entry in network.state_dict().items() if isinstance(entry, Tensor)} | constants_of(network)


def _try_gradients(logits: Tensor, parameters: Mapping[str, Tensor], who: str, how: str) -> None:
    """Compute the gradients of a step."""
    try:
        loss = cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.int64, device=logits.device))
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    except Exception as error:
        raise ConfigError(
            f"the network of {who} has no gradient for {how}: {in_one_line(error, 200)}. Its logits must depend on "
            "parameters that are trained, without detach() or no_grad()."
        ) from error
    if all(gradient is None for gradient in gradients):
        raise ConfigError(f"the network of {who} has logits that depend on none of its trained parameters.")
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.layout != torch.strided:
            raise ConfigError(
                f"the network of {who} has a sparse gradient of {name.removeprefix('body.')!r}, which cannot be used "
                "here. Build its Embedding with sparse=False."
            )


def _checked_logits(output: Any, inputs: Tensor, classes: int, who: str, mode: str) -> Tensor:
    """Return the logits; raise `ConfigError` if the output has none of shape [batch, classes]."""
    logits = logits_of(output)
    if not isinstance(logits, Tensor):
        parts = f" of {len(output)}" if isinstance(output, tuple | list) else ""
        found = "None" if output is None else f"a {type(output).__name__}{parts}"
        raise ConfigError(
            f"the network of {who} gives {found} instead of a tensor of logits{mode}. Return the logits alone, "
            '[batch, classes], or an output that names them: output.logits or output["logits"].'
        )
    expected = (len(inputs), classes)
    if logits.shape == expected and logits.is_floating_point():
        return logits
    hint = ""
    if logits.shape == (len(inputs), 1) and classes == 2:
        hint = " For two classes give two: torch.nn.Linear(width, 2), whose softmax says what the sigmoid of one does."
    elif logits.shape in ((classes,), ()) and len(inputs) == 1:
        hint = " squeeze() without a dimension takes the batch of one away too: write squeeze(1), or flatten(1)."
    elif logits.ndim == 2 and len(logits) == len(inputs) and logits.shape[1] > classes:
        hint = (
            " Give as many as the function is asked for, def net(shape, classes), or torch.nn.Linear(width, "
            f"{classes}): with tasks, those of the first task, and rows are added as classes arrive."
        )
    type_found = "" if logits.is_floating_point() else f" and type {dtype_name(logits)}"
    raise ConfigError(
        f"the network of {who} gives outputs of shape {list(logits.shape)}{type_found}{mode} for {len(inputs)} "
        f"inputs of {_size(inputs)} and {classes} classes. Expected {list(expected)}: one logit a class.{hint}"
    )


@contextmanager
def _watched(network: nn.Module, inputs: Tensor, fails: str) -> Iterator[None]:
    """Raise `ConfigError` for what a network raises, with what is known of the layer that was entered last."""
    entered: list[Entered] = []
    own_name = getattr(network, "own_name", str)  # of a network that was split

    def note(name: str, layer: nn.Module, given: tuple[Any, ...]) -> None:
        entered[:] = [(own_name(name).rstrip("."), layer, given[0] if given else None)]

    leaves = [(name, layer) for name, layer in network.named_modules() if not any(layer.children())]
    hooks = [layer.register_forward_pre_hook(functools.partial(note, name)) for name, layer in leaves]
    try:
        yield
    except Exception as error:
        raise ConfigError(f"{fails}: {_cause(error, entered, inputs) or in_one_line(error, 200)}") from error
    finally:
        for hook in hooks:
            hook.remove()


def _cause(error: Exception, entered: list[Entered], inputs: Tensor) -> str:
    """Say in which layer a network fails, and what the layer expects of the data; empty if it is not known."""
    if not entered:
        return ""
    name, layer, given = entered[0]
    where = f"its layer {name!r} ({type(layer).__name__})" if name else f"the {type(layer).__name__}"
    if not isinstance(given, Tensor):
        return (
            f"{where} gets a {type(given).__name__}. Does forward return more than logits in this mode, such as an "
            "auxiliary head's? Return the logits alone, or an output that names them: output.logits"
        )
    has = "the data have" if given.shape[1:] == inputs.shape[1:] else "it gets"
    weight = next(layer.parameters(), None)
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if given.is_floating_point():
            return f"{where} reads whole numbers such as token ids, and {has} {dtype_name(given)}. Give integers."
        if given.numel() and int(given.max()) >= layer.num_embeddings:
            return (
                f"{where} has rows for the ids 0 to {layer.num_embeddings - 1}, and {has} {int(given.max())} too. Give "
                "the layer more rows; of a column of text, data.vocabulary is how many ids there are."
            )
    elif weight is not None and not given.is_floating_point():
        return (
            f"{where} reads numbers with fractions, and {has} whole numbers ({dtype_name(given)}), which are taken as "
            "token ids. Give the data as floating-point numbers, or begin the network with torch.nn.Embedding."
        )
    if isinstance(layer, nn.Linear) and given.shape[-1:] != (layer.in_features,):
        return f"{where} expects {layer.in_features} features, and {has} {given.shape[-1] if given.ndim else 'none'}."
    return f"{where}: {in_one_line(error, 200)}"


def evaluated(network: nn.Module, inputs: Tensor, *, training: bool = False) -> Any:
    """Return the outputs of a network in a mode, dropout being the same each time; its modes and state dict stay."""
    modes = [(module, module.training) for module in network.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module, _ in modes
        for name, buffer in module._buffers.items()
        if training and buffer is not None and name not in module._non_persistent_buffers_set
    ]
    network.train(training)
    try:
        with torch.no_grad(), seeds.temporary_seed(0, inputs.device):
            return network(inputs)
    finally:
        for module, mode in modes:
            module.training = mode
        for module, name, buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
            module._buffers[name] = buffer


def _size(inputs: Tensor) -> str:
    return "x".join(map(str, inputs.shape[1:]))
