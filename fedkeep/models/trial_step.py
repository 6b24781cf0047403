"""A user's network is tried before it is used, with errors that speak of the network and the data."""

import functools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedkeep._utils import seeds
from fedkeep.errors import ConfigError, in_one_line
from fedkeep.models.weights import dtype_name

Entered: TypeAlias = tuple[str, nn.Module, Any]
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
        logits_of(evaluated(network, one, training=True))
        for one in (inputs, torch.zeros_like(inputs), inputs)  # others in between
    )
    if not torch.allclose(first, again, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise ConfigError(
            f"the network of {who} gives other outputs in training mode for the same examples, weights and seed after "
            "it has seen others: it keeps something that no state dict holds, in an attribute or in a buffer with "
            "persistent=False, which would go from client to client. Register it as a persistent buffer, or keep "
            "nothing."
        )


def check_same_function(network: nn.Module, again: nn.Module, inputs: Tensor, who: str) -> None:
    """Raise `ConfigError` if a network that was built again computes something else with the same weights.

    ``again``: The other one, whose weights are changed: a network in use gets others all the time.
    """
    for parameter in again.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data * 0.9  # not in place: its memory may be the user's
    held = dict(again.named_parameters(remove_duplicate=False)) | {
        name: entry for name, entry in again.state_dict().items() if isinstance(entry, Tensor)
    }
    try:
        outputs = logits_of(evaluated(again, inputs))
    except Exception:
        return  # such weights are none for it, whatever its names are
    try:
        same = logits_of(evaluated(_Filled(network, held), inputs))
    except Exception as error:
        raise ConfigError(
            f"the network of {who} cannot be run with other weights by their names: {in_one_line(error, 200)}. Leave "
            "out wrappers and hooks that rename what its state dict holds."
        ) from error
    if not torch.allclose(outputs, same, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise ConfigError(
            f"the network of {who} gives other outputs when it is built again and gets the same weights: it draws or "
            "keeps something that no state dict holds, in an attribute, in a buffer with persistent=False or in one "
            "with infinite numbers. Register it as a persistent buffer of finite numbers, or draw it from a generator "
            "with a seed of its own; and read weights where they are registered, as in self.layer.weight."
        )


class _Filled(nn.Module):
    """A network that computes with given tensors."""

    def __init__(self, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.network = network
        self.tensors = dict(tensors)

    def forward(self, inputs: Tensor) -> Any:
        return functional_call(self.network, self.tensors, (inputs,), tie_weights=False)


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
        if fixed and not torch.equal(tensor.nan_to_num(), before[name].nan_to_num()):
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
    """Return the logits; raise `ConfigError` if the output has no finite ones of shape [batch, classes]."""
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
        if not bool(logits.isinf().any()):
            return logits
        raise ConfigError(
            f"the network of {who} gives infinite logits{mode}, and losses on soft labels need finite ones. Leave a "
            "class out by a large negative number, such as -1e4, instead of -inf."
        )
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
    return f"in or after {where}: {in_one_line(error, 200)}"


def evaluated(network: nn.Module, inputs: Tensor, *, training: bool = False) -> Any:
    """Return a network's outputs in a mode, with the same dropout each time; modes and state dict are restored."""
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
