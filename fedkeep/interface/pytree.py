"""Trees of values: tensors, numbers and text in lists, ordered dicts and dataclasses, never changed in place.

Messages, states and losses are such trees. `children` returns what is below a node, `tree_iter` visits all nodes, and
`tree_map` builds a tree from another. Everything else here, and `fedkeep.interface.codec`, is built on these three.

Why not a library: PyTorch's own pytrees and `optree` treat a dataclass as a leaf until its class is registered.
PyTorch's registry is process-wide, so that registering a user's class would change what `torch.func.vmap` does with it,
and its `tree_map` takes twice as long. `optree` is as fast as this module, but sorts dicts unless a context says
otherwise, and is one more dependency.
"""

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from operator import methodcaller
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedkeep.losses import Loss
from fedkeep.models.weights import all_finite

T = TypeVar("T")
Path: TypeAlias = tuple[Any, ...]
"""Where a node is in a tree: its parent's path, its parent, and its key there; empty for the root."""

_LEAVES = (Tensor, bool, int, float, str, type(None))


@cache
def _children_of(cls: Any) -> Callable[[Any], Iterable[tuple[Any, Any]]] | None:
    """Return the function that `children` applies to nodes of a class; cached, since every message is traversed."""
    if issubclass(cls, _LEAVES):
        return None
    if issubclass(cls, Mapping):
        return methodcaller("items")
    if issubclass(cls, (list, tuple)):
        return enumerate
    names = [field.name for field in fields(cls)] if is_dataclass(cls) else None
    return None if names is None else lambda tree: [(name, getattr(tree, name)) for name in names]


def children(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the children of a node.

    Returns: Pairs of key and value; None for a leaf.
    """
    cls: Any = type(tree)
    find = _children_of(cls)
    return None if find is None else find(tree)


def tree_iter(tree: Any) -> list[tuple[Path, Any, bool, bool]]:
    """Return all nodes of a tree, parents before their children.

    Returns: For each node its path, its value, whether it is a leaf, and whether it has one row per example
        (`Loss.per_example_fields`).
    """
    nodes: list[tuple[Path, Any, bool, bool]] = []
    _visit(tree, (), False, nodes)
    return nodes


# Not inside `tree_iter`: a nested function that calls itself is a reference cycle, which would keep tensors in
# memory until Python looks for cycles.
def _visit(value: Any, path: Path, per_example: bool, nodes: list[tuple[Path, Any, bool, bool]]) -> None:
    below = children(value)
    nodes.append((path, value, below is None, per_example))
    if below is not None:
        fields = value.per_example_fields if isinstance(value, Loss) else ()
        for key, item in below:
            _visit(item, (path, value, key), per_example or key in fields, nodes)


def tree_nodes(tree: Any) -> list[tuple[Any, bool]]:
    """Return all nodes of a tree as `tree_iter` does, without paths: each node, and whether it is a leaf."""
    nodes: list[tuple[Any, bool]] = []
    _collect(tree, nodes)
    return nodes


def _collect(value: Any, nodes: list[tuple[Any, bool]]) -> None:
    below = children(value)
    nodes.append((value, below is None))
    if below is not None:
        for _, item in below:
            _collect(item, nodes)


def keystr(path: Path) -> str:
    """Return a path as text.

    Returns: Such as ``models.7[0]``; empty for the root.
    """
    if not path:
        return ""
    above, parent, key = path
    before = keystr(above)
    return f"{before}[{key}]" if isinstance(parent, (list, tuple)) else f"{before}.{key}" if before else str(key)


def tree_map(
    function: Callable[[Any], Any],
    tree: Any,
    rebuild: Callable[[Any, dict[Any, Any]], Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Build a tree with other leaves.

    ``function``: Maps each leaf to what replaces it.
    ``rebuild``: Takes a node and its new children by key, and returns the node that replaces it.
    ``is_leaf``: Tells which nodes are treated as leaves although they have children.
    """
    if isinstance(tree, _LEAVES) or (is_leaf and is_leaf(tree)) or (below := children(tree)) is None:
        return function(tree)
    return rebuild(tree, {key: tree_map(function, item, rebuild, is_leaf) for key, item in below})


def _rebuild(node: Any, items: dict[Any, Any]) -> Any:
    """Return a node of the same type with other children."""
    if isinstance(node, (dict, Mapping)):
        return items
    if isinstance(node, (list, tuple)):
        return type(node)(items.values())
    twin = copy.copy(node)  # `__init__` is not called: that of a user's own class may do anything
    for name, item in items.items():
        object.__setattr__(twin, name, item)
    return twin


# Messages and states


def tree_leaves_with_path(tree: Any) -> list[tuple[Path, Any]]:
    """Return all leaves of a value.

    Returns: The path and the value of each tensor, number, text and None, in order (see `keystr`).
    """
    leaves = [(path, value) for path, value, is_leaf, _ in tree_iter(tree) if is_leaf]
    for path, leaf in leaves:
        if not isinstance(leaf, _LEAVES):
            raise TypeError(
                f"{keystr(path) or 'this'} is a {type(leaf).__name__}: only tensors, numbers, text, lists, dicts and "
                "dataclasses of these can travel or be kept in a state"
            )
    return leaves


def tree_leaves(tree: Any) -> list[Any]:
    """Return all leaves of a value, in order."""
    leaves = [value for value, is_leaf in tree_nodes(tree) if is_leaf]
    if not all(isinstance(leaf, _LEAVES) for leaf in leaves):
        tree_leaves_with_path(tree)  # raises the error that says where
    return leaves


def num_bytes(tree: Any) -> int:
    """Return the size of a message without framing: tensors as they are, 8 bytes a number, text in UTF-8.

    ``tree``: The message. A tensor that occurs twice counts once, since it is sent once.
    Returns: Size in bytes.
    """
    total, tensors = 0, {}
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            tensors[id(leaf)] = leaf.nbytes
        elif leaf is not None:
            # From outside text may hold half of a surrogate pair, which UTF-8 does not have.
            total += len(leaf.encode(errors="surrogatepass")) if isinstance(leaf, str) else 8
    return total + sum(tensors.values())


def iter_instances(tree: Any, cls: type[Any]) -> Iterator[Any]:
    """Yield all nodes of a class, parents before their children."""
    return (value for value, is_leaf in tree_nodes(tree) if not is_leaf and isinstance(value, cls))


def find_nonfinite(tree: Any) -> str | None:
    """Find a number that is not finite.

    Returns: The path of the first tensor or number that is not finite; None if there is none.
    """
    leaves = list({id(leaf): leaf for leaf in tree_leaves(tree)}.values())  # a message may name a tensor often
    numbers = (leaf for leaf in leaves if isinstance(leaf, float))
    if all(map(math.isfinite, numbers)) and all_finite([leaf.detach() for leaf in leaves if _is_inexact(leaf)]):
        return None
    looked_at: set[int] = set()
    for path, leaf in tree_leaves_with_path(tree):
        if id(leaf) in looked_at or not (isinstance(leaf, float) or _is_inexact(leaf)):
            continue
        looked_at.add(id(leaf))
        if not (math.isfinite(leaf) if isinstance(leaf, float) else bool(torch.isfinite(leaf).all())):
            return keystr(path) or "the value"
    return None


def _is_inexact(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def copy_containers(tree: T) -> T:
    """Copy a tree's containers, but not its tensors, which are never changed in place.

    Returns: The copy. Frozen dataclasses, and mappings other than dicts, are shared.
    """
    return cast(T, tree_map(lambda leaf: leaf, tree, _copy_node, _is_immutable))


def _copy_node(node: Any, items: dict[Any, Any]) -> Any:
    return replace(node, **items) if is_dataclass(node) and not isinstance(node, type) else _rebuild(node, items)


def _is_immutable(node: Any) -> bool:
    parameters = getattr(node, "__dataclass_params__", None)
    return not isinstance(node, (dict, list, tuple)) and (parameters is None or bool(parameters.frozen))


# Losses that are trained as one


def tree_signature(tree: Any) -> Hashable:
    """Return a hashable description of a tree without the numbers in its tensors; trees with equal ones can be stacked.

    It contains the structure, the types and shapes of tensors, and all leaves that are not tensors. The length of a
    loss's column is not part of it. A leaf that is not hashable makes the signature unlike any other.
    """
    return tuple(_signature(value, is_leaf, per_example) for _, value, is_leaf, per_example in tree_iter(tree))


def _signature(value: Any, is_leaf: bool, per_example: bool) -> Hashable:
    if isinstance(value, Tensor):
        return Tensor, value.dtype, value.shape[1:] if per_example else value.shape
    if is_leaf:
        return value if isinstance(value, Hashable) else object()
    if isinstance(value, (dict, Mapping)):
        return Mapping, *value
    if isinstance(value, (list, tuple)):
        return type(value), len(value)
    hidden = vars(value).keys() - {field.name for field in fields(value)}
    return type(value), object() if hidden else None


def tree_tensors(tree: Any) -> list[tuple[Tensor, bool]]:
    """Return all tensors of a tree in order.

    Returns: Each tensor, and whether it has one row per example (`Loss.per_example_fields`).
    """
    return [(value, per_example) for _, value, _, per_example in tree_iter(tree) if isinstance(value, Tensor)]


def tensor_versions(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Tensor, int]]:
    """Return the tensors of some trees by name and path, each with PyTorch's count of its changes."""
    return [
        (f"{name}.{keystr(path)}".replace(".[", "[").rstrip("."), leaf, leaf._version)
        for name, tree in named
        for path, leaf in tree_leaves_with_path(tree)
        if isinstance(leaf, Tensor) and not leaf.is_inference()
    ]


def changed_in_place(before: Iterable[tuple[str, Tensor, int]]) -> str | None:
    """Return the name of the first of these tensors that was changed since; None if none was."""
    return next((name for name, tensor, version in before if tensor._version != version), None)


def replace_tensors(tree: T, tensors: Iterable[Tensor]) -> T:
    """Replace all tensors of a tree."""
    remaining = iter(tensors)
    return cast(T, tree_map(lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf, tree, _rebuild))


def replace_nodes(tree: T, chosen: Callable[[Any], bool], function: Callable[[Any], Any]) -> T:
    """Replace some nodes of a tree, without looking below them."""
    return cast(T, tree_map(lambda node: function(node) if chosen(node) else node, tree, _rebuild, chosen))


def stack_tensors(trees: Sequence[Any]) -> list[Tensor]:
    """Stack the tensors of several trees that have the same `tree_signature`.

    Columns of a loss are padded to the longest with rows that are never read. A tensor that all trees share is stacked
    too: after a resume it may no longer be one object, and the result must not depend on that.

    Returns: The tensors in the order of `tree_tensors`, each with a leading dimension for the trees.
    """
    found = [zip(*same, strict=True) for same in zip(*map(tree_tensors, trees), strict=True)]
    return [pad_sequence(list(parts), batch_first=True) if column[0] else torch.stack(parts) for parts, column in found]
