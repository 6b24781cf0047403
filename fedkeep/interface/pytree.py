"""Trees of values: tensors, numbers and text in lists, ordered dicts and dataclasses, never changed in place.

Messages, states and losses are such trees. `children` says what is below a node, `tree_iter` visits all nodes, and
`tree_map` builds a tree from another; all else here and in `fedkeep.interface.codec`, which writes trees down, uses
these. PyTorch's own pytrees and `optree` treat a dataclass as a leaf until its class is registered. PyTorch's registry
holds for the whole process, which would change what `torch.func.vmap` makes of a user's class, and its `tree_map` takes
twice as long. `optree` is as quick as this, sorts dicts unless a context says otherwise, and is one dependency more.
"""

from __future__ import annotations

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

T = TypeVar("T")
Path: TypeAlias = tuple[Any, ...]
"""Where a node is: the path of the node above it, that node, and the key there; empty for the root."""

_LEAVES = (Tensor, bool, int, float, str, type(None))


@cache
def _children_of(cls: Any) -> Callable[[Any], Iterable[tuple[Any, Any]]] | None:
    """Return `children` for nodes of a class: looked up once for each class, since every message is walked."""
    if issubclass(cls, _LEAVES):
        return None
    if issubclass(cls, Mapping):
        return methodcaller("items")
    if issubclass(cls, (list, tuple)):
        return enumerate
    names = [field.name for field in fields(cls)] if is_dataclass(cls) else None
    return None if names is None else lambda tree: [(name, getattr(tree, name)) for name in names]


def children(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return what is directly below a node, as pairs of key and value; None for a leaf."""
    cls: Any = type(tree)
    find = _children_of(cls)
    return None if find is None else find(tree)


def tree_iter(tree: Any) -> list[tuple[Path, Any, bool, bool]]:
    """Return (path, value, is_leaf, in_column) of every node, the outer before the inner; see `Loss.columns`."""
    nodes: list[tuple[Path, Any, bool, bool]] = []

    def visit(value: Any, path: Path, in_column: bool) -> None:
        below = children(value)
        nodes.append((path, value, below is None, in_column))
        if below is not None:
            columns = value.columns if isinstance(value, Loss) else ()
            for key, item in below:
                visit(item, (path, value, key), in_column or key in columns)

    visit(tree, (), False)
    return nodes


def keystr(path: Path) -> str:
    """Return a node's path as text, such as ``models.7[0]``; empty for the root."""
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
    """Return a tree with ``function(leaf)`` in the place of every leaf.

    Parameters
    ----------
    rebuild : takes a node and what came of its children, by key, and returns what takes its place.
    is_leaf : tells which nodes are leaves even if they have children.
    """

    def visit(value: Any) -> Any:
        if isinstance(value, _LEAVES) or (is_leaf and is_leaf(value)) or (below := children(value)) is None:
            return function(value)
        return rebuild(value, {key: visit(item) for key, item in below})

    return visit(tree)


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
    """Return (path, leaf) for every tensor, number, text and None in a tree, in order; see `keystr`.

    Raises
    ------
    TypeError
        For anything else, with the path where it was found.
    """
    leaves = [(path, value) for path, value, is_leaf, _ in tree_iter(tree) if is_leaf]
    for path, leaf in leaves:
        if not isinstance(leaf, _LEAVES):
            raise TypeError(
                f"{keystr(path) or 'this'} is a {type(leaf).__name__}: only tensors, numbers, text, lists, dicts and "
                "dataclasses of these can travel or be kept in a state"
            )
    return leaves


def num_bytes(tree: Any) -> int:
    """Return the bytes of a tree on the wire, without framing: tensors as they are, numbers 8, text in UTF-8.

    A tensor that occurs twice in a message travels once.
    """
    total, tensors = 0, {}
    for _, leaf in tree_leaves_with_path(tree):
        if isinstance(leaf, Tensor):
            tensors[id(leaf)] = leaf.nbytes
        elif leaf is not None:
            total += len(leaf.encode()) if isinstance(leaf, str) else 8
    return total + sum(tensors.values())


def iter_instances(tree: Any, cls: type[Any]) -> Iterator[Any]:
    """Yield every dataclass or mapping of a class in a tree, the outer before the inner."""
    return (value for _, value, is_leaf, _ in tree_iter(tree) if not is_leaf and isinstance(value, cls))


def find_nonfinite(tree: Any) -> str | None:
    """Return the path of the first tensor or number that is not finite, or None."""
    found = [(path, leaf) for path, leaf in tree_leaves_with_path(tree) if isinstance(leaf, float) or _is_inexact(leaf)]
    # A sum is finite only of finite numbers, and one look at all sums is quicker than one at each tensor.
    sums = [leaf.sum().abs().float() for _, leaf in found if isinstance(leaf, Tensor)]
    numbers = [leaf for _, leaf in found if isinstance(leaf, float)]
    stacked = torch.stack([one.to(sums[0].device) for one in sums]) if sums else torch.zeros(1)
    if all(map(math.isfinite, numbers)) and bool(torch.isfinite(stacked).all()):
        return None
    for path, leaf in found:  # finite numbers may overflow a sum
        if not (math.isfinite(leaf) if isinstance(leaf, float) else bool(torch.isfinite(leaf).all())):
            return keystr(path) or "the value"
    return None


def _is_inexact(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def copy_containers(tree: T) -> T:
    """Return a tree with its own containers and the same tensors: enough, since tensors are never changed in place.

    Frozen dataclasses, and mappings other than dicts, are shared.
    """
    return cast(T, tree_map(lambda leaf: leaf, tree, _copy_node, _is_immutable))


def _copy_node(node: Any, items: dict[Any, Any]) -> Any:
    return replace(node, **items) if is_dataclass(node) and not isinstance(node, type) else _rebuild(node, items)


def _is_immutable(node: Any) -> bool:
    parameters = getattr(node, "__dataclass_params__", None)
    return not isinstance(node, (dict, list, tuple)) and (parameters is None or bool(parameters.frozen))


# Losses that are trained as one


def tree_signature(tree: Any) -> Hashable:
    """Return all of a tree but the numbers inside its tensors; of a column of a loss, its length does not count either.

    Trees of one signature can be stacked. Leaves that are not tensors count by equality if they are hashable;
    otherwise they make the signature unlike any other.
    """
    return tuple(_signature(value, is_leaf, in_column) for _, value, is_leaf, in_column in tree_iter(tree))


def _signature(value: Any, is_leaf: bool, in_column: bool) -> Hashable:
    if isinstance(value, Tensor):
        return Tensor, value.dtype, value.shape[1:] if in_column else value.shape
    if is_leaf:
        return value if isinstance(value, Hashable) else object()
    if isinstance(value, (dict, Mapping)):
        return Mapping, *value
    if isinstance(value, (list, tuple)):
        return type(value), len(value)
    hidden = vars(value).keys() - {field.name for field in fields(value)}
    return type(value), object() if hidden else None


def tree_tensors(tree: Any) -> list[tuple[Tensor, bool]]:
    """Return a tree's tensors in order, and which of them are columns of a loss (see `Loss`)."""
    return [(value, in_column) for _, value, _, in_column in tree_iter(tree) if isinstance(value, Tensor)]


def replace_tensors(tree: T, tensors: Iterable[Tensor]) -> T:
    """Return a tree with other tensors, in the order of `tree_tensors`."""
    remaining = iter(tensors)
    return cast(T, tree_map(lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf, tree, _rebuild))


def stack_tensors(trees: Sequence[Any]) -> list[Tensor]:
    """Stack trees of one signature: return their tensors in order, each with a leading dimension.

    Columns are filled up to the longest with rows that nobody reads. What is one tensor for all is stacked too: that it
    is one is not certain after a resume, and another way to compute would round otherwise.
    """
    found = [zip(*same, strict=True) for same in zip(*map(tree_tensors, trees), strict=True)]
    return [pad_sequence(list(parts), batch_first=True) if column[0] else torch.stack(parts) for parts, column in found]
