"""The codec for messages and states: values to safetensors and back, guided by type annotations. Never pickle.

The tensors of a value are stored under numbers as names, and its structure as JSON in a byte tensor beside them, so
that one blob contains everything. Decoding follows a type annotation: that of a step's parameter, of its result or of a
state. A value that does not match is refused. Only dataclasses that the annotation names, and their subclasses, are
ever constructed.
"""

import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import ValueRefused
from fedkeep.interface.pytree import children
from fedkeep.models import Weights
from fedkeep.options import full_name

_STRUCTURE = "structure"
_PLAIN = (Tensor, bool, int, float, str)


def encode(value: Any) -> bytes:
    """Encode a value as bytes.

    ``value``: Tensors, numbers, text and None in lists, tuples, dicts and dataclasses (see `fedkeep.interface.pytree`).
    """
    structure, found = to_structure(value)
    storages: set[int] = set()
    tensors = {name: own_storage(tensor, storages) for name, tensor in found.items()}
    text = bytearray(json.dumps(structure, separators=(",", ":")).encode())
    return save({**tensors, _STRUCTURE: torch.frombuffer(text, dtype=torch.uint8)})


def to_structure(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Separate a value into its structure and its tensors; `from_structure` puts them together again.

    Returns: The structure, which JSON can represent, with names in place of tensors.
    Returns: The tensors by these names. A tensor that occurs twice is contained once.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[int, str] = {}

    def name(tensor: Tensor) -> str:
        if id(tensor) not in seen:
            seen[id(tensor)] = str(len(tensors))
            tensors[seen[id(tensor)]] = tensor
        return seen[id(tensor)]

    return encode_structure(value, name), tensors


def decode(blob: bytes, hint: Any, device: torch.device | None = None) -> Any:
    """Decode a value that `encode` has encoded, and check it against a type annotation.

    ``device``: Where to put the tensors; by default they stay on the CPU.
    """
    try:
        tensors = load(blob)
        text = tensors.pop(_STRUCTURE)
        if text.dtype != torch.uint8 or text.dim() != 1:
            raise ValueError("its structure is not text")
        structure = json.loads(text.numpy().tobytes())
    except (SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise ValueRefused(f"damaged message or file: {error}. Ask for it again, or restore it from a copy.") from error
    if device is not None:
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return from_structure(structure, tensors, hint)


def from_structure(structure: Any, tensors: Mapping[str, Tensor], hint: Any) -> Any:
    """Build a value from its structure and its tensors, and check it against a type annotation."""
    try:
        return _decode(structure, tensors, hint, "the value")
    except ValueRefused as error:
        raise ValueRefused(f"{error} Both sides must run the same method and version of FedKeep.") from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # A message from outside may be malformed in any way; whatever error that causes, the message is refused.
        raise ValueRefused(f"damaged message or file: {error}. Ask for it again, or restore it from a copy.") from error


def find_wrong_type(value: Any, hint: Any, what: str) -> str | None:
    """Describe how a value differs from a type annotation, so that `decode` would refuse it.

    Returns: A sentence, such as ``the reply.model is None, not Weights.``; None if the value is of this type.
    """
    try:
        _decode(*to_structure(value), hint, what)
    except TypeError as error:
        return f"{what}: {error}"
    except ValueRefused as error:
        return str(error)
    return None


def find_unknown_type(hint: Any) -> str | None:
    """Find a type in an annotation whose values cannot be encoded, or could not be checked when they are decoded.

    Returns: The type, such as ``dict``, of which only ``dict[str, Tensor]`` says what is in it; None if there is none.
    """
    return _unknown_type(hint, set())


def _unknown_type(hint: Any, known: set[Any]) -> str | None:
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, TypeVar) or origin is Literal or hint in (None, types.NoneType, *_PLAIN):
        return None
    if origin in (Union, types.UnionType, list, tuple, Sequence, dict, Mapping):
        below = [argument for argument in arguments if argument is not Ellipsis]
    elif is_dataclass(origin or hint):
        hints = annotations_of(origin or hint)
        below = [] if hint in known else [hints[field.name] for field in fields(origin or hint)]
        known.add(hint)
    else:
        return _describe(hint)
    return next((found for one in below if (found := _unknown_type(one, known))), None)


def encode_structure(value: Any, name: Callable[[Tensor], str]) -> Any:
    """Return a value's structure.

    Returns: The structure, which JSON can represent.
    """
    if isinstance(value, Tensor):
        return {"tensor": name(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    below, is_mapping = children(value), isinstance(value, (dict, Mapping))
    if below is None or (is_mapping and not all(isinstance(key, (str, int)) for key in value)):
        raise TypeError(
            f"a {type(value).__name__} cannot travel or be kept in a state: use tensors, numbers, text, lists, dicts "
            "whose keys are text or integers, and dataclasses of these."
        )
    items = [(key, encode_structure(item, name)) for key, item in below]
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [item for _, item in items]}
    return {"dict": list(map(list, items))} if is_mapping else {"class": full_name(type(value)), "fields": dict(items)}


def own_storage(tensor: Tensor, taken: set[int]) -> Tensor:
    """Return a tensor on the CPU that fills its storage and shares it with no other, as safetensors requires.

    ``taken``: Addresses of the storages that other tensors of the message use. The address of this one is added.
    Returns: The tensor itself if it meets this already, otherwise a copy.
    """
    tensor = tensor.detach().cpu().contiguous()
    storage = tensor.untyped_storage()
    if storage.data_ptr() in taken or storage.nbytes() != tensor.nbytes:
        return tensor.clone()  # the storage of a copy is new
    taken.add(storage.data_ptr())
    return tensor


def _decode(node: Any, tensors: Mapping[str, Tensor], hint: Any, where: str) -> Any:
    if type(node) is hint is not dict:  # most are numbers and text
        return node
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, TypeVar):
        return _decode(node, tensors, hint.__bound__ or Any, where)
    if origin in (Union, types.UnionType):
        return _decode_union(node, tensors, arguments, where)
    if origin is Literal:
        for choice in arguments:
            if type(node) is type(choice) and node == choice:
                return choice
    elif hint is None or hint is type(None):
        if node is None:
            return None
    elif hint is float and isinstance(node, dict) and node.get("float") in ("inf", "-inf", "nan"):
        return float(node["float"])
    elif hint is Tensor and isinstance(node, dict) and node.get("tensor") in tensors:
        return tensors[node["tensor"]]
    elif hint in (bool, int, float, str) and isinstance(node, (int, float) if hint is float else hint):
        if hint is bool or not isinstance(node, bool):
            return hint(node)
    elif origin in (list, tuple, Sequence) and isinstance(node, dict):
        items = node.get("list", node.get("tuple"))
        if isinstance(items, list):
            return _decode_sequence(items, tensors, origin, arguments, where)
    elif origin in (dict, Mapping) and isinstance(node, dict) and isinstance(node.get("dict"), list):
        return {
            _decode(key, tensors, arguments[0], f"a key of {where}"): _decode(
                item, tensors, arguments[1], f"{where}.{str(key)[:80]}"
            )
            for key, item in node["dict"]
        }
    elif _may_be_dataclass(origin or hint) and isinstance(node, dict) and "class" in node:
        return _decode_dataclass(node, tensors, origin or hint, where)
    if hint is Tensor and isinstance(node, dict) and "tensor" in node:
        raise ValueRefused(f"{where} names a tensor that the message does not hold.")
    raise ValueRefused(f"{where} is {_describe_node(node)}, not {_describe(hint)}.")


def _decode_union(node: Any, tensors: Mapping[str, Tensor], alternatives: tuple[Any, ...], where: str) -> Any:
    for alternative in alternatives:
        try:
            return _decode(node, tensors, alternative, where)
        except ValueRefused as error:
            refusal = error
    raise refusal


def _decode_sequence(
    items: list[Any], tensors: Mapping[str, Tensor], origin: Any, arguments: tuple[Any, ...], where: str
) -> Any:
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        if len(items) != len(arguments):
            raise ValueRefused(f"{where} has {len(items)} items instead of {len(arguments)}.")
        return tuple(
            _decode(i, tensors, a, f"{where}[{n}]") for n, (i, a) in enumerate(zip(items, arguments, strict=True))
        )
    restored = [_decode(item, tensors, arguments[0], f"{where}[{number}]") for number, item in enumerate(items)]
    return tuple(restored) if origin is tuple else restored


def _decode_dataclass(node: dict[str, Any], tensors: Mapping[str, Tensor], hint: type, where: str) -> Any:
    named = (cls for cls in reversed(_with_subclasses(hint)) if is_dataclass(cls) and full_name(cls) == node["class"])
    cls: Any = next(named, None)
    content = node.get("fields")
    if cls is None or not isinstance(content, dict):
        raise ValueRefused(f"{where} is a {str(node['class'])[:80]!r} where {_describe(hint)} is expected.")
    names = {field.name for field in fields(cls)}
    if set(content) != names:
        raise ValueRefused(f"{where} has the fields {sorted(content)} instead of {sorted(names)}.")
    hints = annotations_of(cls)
    return cls(**{name: _decode(item, tensors, hints[name], f"{where}.{name}") for name, item in content.items()})


def _with_subclasses(cls: type) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return [cls, *(found for child in children for found in _with_subclasses(child))]


def _describe_node(node: Any) -> str:
    """Describe what a node of a structure stands for."""
    if not isinstance(node, dict):
        return "None" if node is None else f"of type {type(node).__name__}"
    kind = next(iter(node), "nothing")
    return f"a {str(node['class']).rpartition('.')[2][:80]}" if kind == "class" else f"a {kind}"


def _may_be_dataclass(cls: Any) -> bool:
    return isinstance(cls, type) and cls not in (object, list, tuple, Sequence, dict, Mapping)


def _describe(hint: Any) -> str:
    if hint == Weights:
        return "Weights, which are tensors by name"
    return getattr(hint, "__name__", str(hint)) if get_origin(hint) is None else str(hint)
