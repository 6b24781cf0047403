"""What tells the user's own networks, losses and methods from others, so that a resumed run notices a changed one."""

import ast
import dataclasses
import dis
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
import textwrap
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedkeep.models.weights import tensor_hash

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device, range)
_HOLDING = (tuple, list, set, frozenset, Mapping)
_NAMESPACES = (SimpleNamespace, Namespace)
_CALLED = (BuiltinFunctionType, functools.partial)
_FILLING = {"append", "extend", "insert", "update", "setdefault", "add", "pop", "clear", "remove", "discard"}
_FILLED = (list, dict, set)
_LIBRARIES = ({"torch", "fedkeep"} | sys.stdlib_module_names) - {"__main__"}
_STANDARD = sysconfig.get_path("stdlib")
_BEGINNING = ("__init__", "__post_init__", "__setstate__")
_SELF = "first argument"
_WRAPPING = (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod)
"""What holds a function in a class."""


def source_text(value: type | FunctionType) -> str:
    """Return the code of a class or function without comments, docstrings and layout; empty if Python lacks it."""
    return _source_text(value, _codes_of(value))


@functools.lru_cache(maxsize=1000)
def _source_text(value: type | FunctionType, codes: tuple[CodeType, ...]) -> str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node, False):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def describe(value: Any) -> Any:
    """Return a description by which a changed object is noticed, the same in each process: code, numbers and texts.

    Of the user's functions and classes these are also the globals that they read: numbers, texts and arrays, alone or
    in lists and the like, losses and networks of PyTorch, and other functions and classes of the user's. What the code
    itself changes is left out, and a library's objects count by the name of their class.
    """
    description = _Description()
    found = [description.of(value)]
    while description.waiting:
        found.append(description.of_code(description.waiting.popleft()))
    return found


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a network or loss that PyTorch does not give it, by name."""
    usual = vars(nn.Module())
    return {name: value for name, value in vars(module).items() if name not in usual}


def is_option(value: Any) -> bool:
    """Tell whether an attribute says how a layer computes: a number or a text, a function, or what holds such."""
    if isinstance(value, Mapping):
        return all(map(is_option, value.values()))
    if isinstance(value, _HOLDING):
        return all(map(is_option, value))
    kinds = *_PLAIN, *_NAMESPACES, *_CALLED, FunctionType
    return isinstance(value, kinds) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


class _Look(NamedTuple):
    """What the code of a function or class does.

    ``reads``: Names of globals.
    ``sets``: Names of variables that it sets, of its own or around it, or of which it sets a part.
    ``fills``: Names of variables of which it calls a method that fills lists and the like.
    ``attributes``: Names of attributes of ``self`` that it changes after the beginning.
    """

    reads: frozenset[str]
    sets: frozenset[str]
    fills: frozenset[str]
    attributes: frozenset[str]

    def changes(self, name: str, value: Any) -> bool:
        """Tell whether the code changes a variable."""
        return name in self.sets or (name in self.fills and isinstance(value, _FILLED))


class _Description:
    """Describes one object; what occurs again is given by its number, so that circles end.

    ``waiting``: The user's functions and classes that are still to be described.
    """

    def __init__(self) -> None:
        self.waiting: deque[type | FunctionType] = deque()
        self.numbers: dict[int, int] = {}
        self.described: list[Any] = []  # so that no other object gets the id of one of these
        self.known: set[type | FunctionType] = set()  # code whose changes are in these:
        self.sets: set[str] = set()
        self.fills: set[str] = set()

    def of(self, value: Any) -> Any:
        """Return the description of an object."""
        if isinstance(value, np.generic):
            return str(value.dtype), value.item()
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, BuiltinFunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, Enum):
            return f"{_name(type(value))}.{value.name}", self.of(value.value)
        if isinstance(value, Tensor):
            return _of_tensor(value)
        if isinstance(value, np.ndarray):
            if value.dtype.kind == "O":
                return [self.of(one) for one in value.ravel().tolist()]
            numbers = value.tobytes() if value.dtype.kind in "biufc" else repr(value.tolist()).encode()
            return str(value.dtype), value.shape, hashlib.sha256(numbers).hexdigest()  # repr(value) shows a few
        if isinstance(value, set | frozenset):
            return sorted(map(_in_a_set, value))
        if id(value) in self.numbers:
            return f"object {self.numbers[id(value)]}"
        self.numbers[id(value)] = len(self.numbers)
        self.described.append(value)
        if isinstance(value, Mapping):
            return [(self.of(key), self.of(entry)) for key, entry in value.items()]
        if isinstance(value, type | FunctionType) and _is_own(value):
            self.waiting.append(value)
            return f"object {self.numbers[id(value)]}"
        try:
            parts = self._parts(value)
        except Exception:  # an object's own code may raise anything
            parts = (_name(type(value)),)
        return [self.of(part) for part in parts]

    def _parts(self, value: Any) -> Any:
        """Return what an object is made of; of a library's one the name of its class is all."""
        if isinstance(value, tuple | list):
            return value
        if isinstance(value, _NAMESPACES):
            return [vars(value)]
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
        if isinstance(value, torch.jit.ScriptModule):
            graph = value.inlined_graph.str(False)  # type: ignore[attr-defined]  # without the names of files
            return re.sub(r"___torch_mangle_\d+\.", "", graph), value.state_dict()
        if isinstance(value, torch.jit.ScriptFunction):
            return (value.code,)
        if isinstance(value, type | FunctionType):
            return _name(value), getattr(value, "__wrapped__", None)  # by a decorator of a library
        if hasattr(value, "__wrapped__"):  # cached by functools
            return (value.__wrapped__,)
        changed = {name for cls in type(value).__mro__ if _is_own(cls) for name in _look_into(cls).attributes}
        if isinstance(value, nn.Module):
            if original := getattr(value, "_orig_mod", None):
                return (original,)  # compiled
            kept = {} if isinstance(value, _NormBase) else value._buffers  # running means follow the batches
            found = {**own_attributes(value), **value._parameters, **kept, **value._modules}
            return type(value), {name: one for name, one in found.items() if name not in changed}
        if not _is_own(type(value)):
            return (_name(type(value)),)
        state = value.__getstate__()
        if isinstance(state, dict):
            state = {name: one for name, one in state.items() if name not in changed}
        return type(value), state

    def of_code(self, value: type | FunctionType) -> Any:
        """Describe the code of the user's function or class, and the values that it reads and never changes."""
        looked = _look_into(value)
        closed, globals_read = dict[str, Any](), dict[str, Any]()
        for function in functions_of(value):
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            for name in sorted(cells.keys() - {"__class__"}):
                with suppress(ValueError):  # the variable is not set yet
                    if not looked.changes(name, cells[name].cell_contents):
                        closed[name] = cells[name].cell_contents
        self._note_changes(value)
        for name, found in _globals(value):
            is_changed = name in self.sets or (name in self.fills and isinstance(found, _FILLED))
            if _counts(found) and (isinstance(found, type | FunctionType) or not is_changed):
                globals_read[name] = found
        source = source_text(value) if "<lambda>" not in value.__qualname__ else ""
        code = source or [_compiled(function.__code__) for function in functions_of(value)]
        if isinstance(value, FunctionType):
            return [self.of(part) for part in (code, closed, value.__defaults__, value.__kwdefaults__, globals_read)]
        attributes = {
            name: one
            for name, one in vars(value).items()
            if not re.fullmatch("__.*__", name) and name not in looked.attributes
            if _counts(one) and not isinstance(one, FunctionType)
        }
        defaults = [(one.__defaults__, one.__kwdefaults__) for one in functions_of(value)]
        return [self.of(part) for part in (code, closed, defaults, attributes, globals_read, *value.__bases__)]

    def _note_changes(self, value: type | FunctionType) -> None:
        """Note what a function or class changes, and all code that it reaches by globals."""
        waiting = deque([value])
        while waiting:
            one = waiting.popleft()
            if one not in self.known:
                self.known.add(one)
                self.sets |= _look_into(one).sets
                self.fills |= _look_into(one).fills
                found = (inspect.unwrap(each) if hasattr(each, "__wrapped__") else each for _, each in _globals(one))
                waiting += [each for each in found if isinstance(each, type | FunctionType) and _is_own(each)]


def _of_tensor(value: Tensor) -> Any:
    if value.is_meta:
        return str(value.dtype), list(value.shape)
    return tensor_hash(value if value.layout == torch.strided else value.to_dense())


def _name(value: type | FunctionType) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _in_a_set(value: Any) -> str:
    """Return a member of a set, whose order is another in each process."""
    if isinstance(value, tuple | frozenset):
        members = map(_in_a_set, value)
        return repr(list(members) if isinstance(value, tuple) else sorted(members))
    named = value if isinstance(value, type | FunctionType) else type(value)
    return repr(value) if isinstance(value, _PLAIN) else getattr(value, "__qualname__", _name(named))


def _is_own(value: type | FunctionType) -> bool:
    """Tell whether a class or function is the user's; of an installed library the version is on record."""
    module = value.__module__ or ""
    if module.partition(".")[0] in _LIBRARIES:
        return False
    if isinstance(value, FunctionType):  # a decorator may have given it the module of what it wraps
        file = value.__code__.co_filename
    else:
        file = "" if module == "__main__" else str(getattr(sys.modules.get(module), "__file__", ""))
    return not (file.startswith(_STANDARD) or "site-packages" in file or "dist-packages" in file)


def _counts(value: Any) -> bool:
    """Tell whether a global counts; a module, or an object of a library, says too little of itself, or too much."""
    if isinstance(value, type | FunctionType):
        return _is_own(value) or hasattr(value, "__wrapped__")
    kinds = *_PLAIN, *_HOLDING, *_NAMESPACES, *_CALLED, Tensor, np.ndarray, nn.Module, Enum
    return isinstance(value, kinds) or dataclasses.is_dataclass(value) or hasattr(value, "__wrapped__")


def functions_of(value: type | FunctionType) -> list[FunctionType]:
    """Return a function, or those that a class defines."""
    if isinstance(value, FunctionType):
        return [value]
    found = []
    for each in vars(value).values():
        if isinstance(each, (FunctionType, *_WRAPPING)):
            inside = (getattr(each, name, None) for name in ("__func__", "func", "fget", "fset", "__wrapped__"))
            found += [one for one in (each, *inside) if isinstance(one, FunctionType)]
    return [inspect.unwrap(one) for one in found]


def _globals(value: type | FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function or class reads, by name, in the order of their names."""
    space = {name: one for function in functions_of(value) for name, one in function.__globals__.items()}
    for name in sorted(_look_into(value).reads & space.keys()):
        if not name.startswith("__"):
            yield name, space[name]


def _codes_of(value: type | FunctionType) -> tuple[CodeType, ...]:
    """Return the code of a function, or a class, which notebooks edit in place (autoreload)."""
    return tuple(function.__code__ for function in functions_of(value))


def _look_into(value: type | FunctionType) -> _Look:
    return _looked_into(value, _codes_of(value))


@functools.lru_cache(maxsize=1000)
def _looked_into(value: type | FunctionType, codes: tuple[CodeType, ...]) -> _Look:
    reads, sets, fills, attributes = set[str](), set[str](), set[str](), set[str]()
    for function in functions_of(value):
        for code in _codes(function.__code__):
            reads |= {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    source = source_text(value) if "<lambda>" not in value.__qualname__ else ""
    tree = ast.parse(source)
    for decorated in ast.walk(tree):
        for decorator in getattr(decorated, "decorator_list", ()):
            reads |= {node.id for node in ast.walk(decorator) if isinstance(node, ast.Name)}
    compiled = (change for function in functions_of(value) for change in _changes_in_code(function))
    for root, attribute, how, beginning in _changes_in_source(tree) if source else compiled:
        if root == _SELF and attribute:
            attributes |= set() if beginning else {attribute}
        else:
            (fills if how == "filled" else sets).add(root)
    return _Look(*map(frozenset, (reads, sets, fills, attributes)))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a piece of code and those of the functions in it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


def _compiled(code: CodeType) -> Any:
    """Return bytecode, names and constants: of lambdas, whose source is whole lines, and of code without source."""
    constants = [_compiled(one) if isinstance(one, CodeType) else _in_a_set(one) for one in code.co_consts]
    return code.co_code.hex(), code.co_names, constants


_Change: TypeAlias = tuple[str, str, str, bool]
"""The variable, the first of its attributes on the way, "set" or "filled", and whether an object is only made there."""


def _changes_in_source(node: ast.AST, beginning: bool = False, first: str = "") -> Iterator[_Change]:
    """Yield what a piece of code changes: variables that are not its own, and parts of any."""
    if isinstance(node, ast.FunctionDef) and not first:  # a function in a method reads the method's first argument
        beginning, first = node.name in _BEGINNING, node.args.args[0].arg if node.args.args else ""
    changed: ast.AST | None = None
    how = "set"
    if isinstance(node, ast.Global | ast.Nonlocal):
        yield from ((name, "", how, beginning) for name in node.names)
    elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
        changed = node
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and (found := _how(node.func.attr)):
        changed, how = node.func.value, found
    attribute = ""
    while isinstance(changed, ast.Subscript | ast.Attribute):
        attribute = changed.attr if isinstance(changed, ast.Attribute) else attribute
        changed = changed.value
    if isinstance(changed, ast.Name):
        yield _SELF if changed.id == first else changed.id, attribute, how, beginning
    for child in ast.iter_child_nodes(node):
        yield from _changes_in_source(child, beginning, first)


def _changes_in_code(function: FunctionType) -> Iterator[_Change]:
    """Yield the same of a function without source, as far as the order of its instructions tells."""
    beginning = function.__name__ in _BEGINNING
    for code in _codes(function.__code__):
        root = attribute = ""
        first = code.co_varnames[0] if code.co_argcount else ""
        for step in dis.get_instructions(code):
            name = str(step.argval)
            if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF") or (step.opname == "LOAD_FAST" and name == first):
                root, attribute = _SELF if name == first else name, ""
            elif step.opname in ("STORE_GLOBAL", "STORE_DEREF"):
                yield name, "", "set", beginning
            elif step.opname in ("STORE_ATTR", "STORE_SUBSCR"):
                if not isinstance(function.__globals__.get(root, []), _PLAIN):  # what is stored, not what has the part
                    yield root, attribute or name, "set", beginning
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                if how := _how(name):
                    yield root, attribute, how, beginning
                attribute = attribute or name


def _how(method: str) -> str:
    """Return how a method changes its object, by its name: lists and the like are filled, tensors set in place."""
    return "filled" if method in _FILLING else "set" if re.search("[^_]_$", method) else ""
