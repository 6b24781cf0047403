"""What tells the user's own networks, losses and methods from others, so that a resumed run notices a changed one."""

import ast
import dataclasses
import dis
import functools
import hashlib
import inspect
import re
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from symtable import symtable
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeGuard

import numpy as np
from torch import Tensor, nn

from fedkeep.models.weights import tensor_hash

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic)
_HOLDING = (tuple, list, set, frozenset, Mapping)
_NAMESPACES = (SimpleNamespace, Namespace)
_COUNTED = (*_PLAIN, *_HOLDING, *_NAMESPACES, Tensor, np.ndarray, nn.Module, functools.partial)
"""The kinds of globals that count, beside dataclasses; another object says too little of itself, or too much."""
_FILLING = {"append", "extend", "insert", "update", "setdefault", "add", "pop", "clear", "remove", "discard"}


def source_text(value: Any) -> str:
    """Return the code of a class or function without comments, docstrings and layout; empty if Python lacks it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node, False):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def describe(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Return what tells an object from another, the same in each process: code, numbers, and all that it is made of.

    Of a function or class these are also the globals that it reads: numbers, texts and arrays, alone or in lists and
    the like, losses and networks of PyTorch, and the functions and classes of its own module.
    """
    if id(value) in within:
        return "itself"
    if isinstance(value, Tensor):
        return tensor_hash(value)
    if isinstance(value, np.ndarray):
        numbers = value.tobytes() if value.dtype.kind in "biufc" else repr(value.tolist()).encode()
        return str(value.dtype), value.shape, hashlib.sha256(numbers).hexdigest()  # repr(value) shows a few
    if isinstance(value, np.generic):
        return str(value.dtype), value.item()
    if isinstance(value, type | FunctionType) and value.__module__.startswith(("torch.", "fedkeep.")):
        return f"{value.__module__}.{value.__qualname__}"
    parts: Any
    if isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, MethodType):
        owner = value.__self__
        parts = value.__func__, owner if callable(owner) else getattr(owner, "__dict__", ())
    elif isinstance(value, FunctionType):
        parts = *_made_of(value), globals_read(value)
    elif isinstance(value, CodeType):
        parts = value.co_code.hex(), value.co_names, value.co_consts
    elif isinstance(value, type):
        parts = *_made_of(value), globals_read(value), *value.__bases__
    elif isinstance(value, Mapping):
        parts = [*value.items()]
    elif isinstance(value, nn.Module):
        parts = type(value), own_attributes(value) | value._parameters | value._buffers | value._modules
    elif isinstance(value, tuple | list):
        parts = value
    elif isinstance(value, set | frozenset):
        return sorted(repr(describe(part, (*within, id(value)))) for part in value)
    elif isinstance(value, _NAMESPACES):
        parts = [*vars(value).items()]
    elif type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:  # an object of the user's class
        state = value.__getstate__()
        parts = type(value), ADDRESS.sub("", repr(value)) if state is None else state
    else:
        return ADDRESS.sub("", repr(value))
    return [describe(part, (*within, id(value))) for part in parts]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a network or loss that PyTorch does not give it, by name."""
    usual = vars(nn.Module())
    return {name: value for name, value in vars(module).items() if name not in usual}


def is_plain(value: Any) -> bool:
    """Tell whether a value is a number, a text or None, or holds nothing else."""
    if isinstance(value, Mapping):
        return all(map(is_plain, value.values()))
    return isinstance(value, _PLAIN) or (isinstance(value, _HOLDING) and all(map(is_plain, value)))


def globals_read(value: type | FunctionType) -> dict[str, Any]:
    """Return the globals that a function or class of the user's reads and never changes, described, by name.

    With them come those that the functions and classes of its own module read among them.
    """
    of = value.__module__
    known = vars(sys.modules[of]) if of in sys.modules else {}
    module = value.__globals__ if isinstance(value, FunctionType) else known
    if "site-packages" in str(module.get("__file__")):
        return {}  # of an installed library, whose files are long, the version is on record
    found: dict[str, Any] = {}
    changed: set[str] = set()
    waiting = [value]
    while waiting:
        for name, how in _globals_of(waiting.pop()):
            if how == "set" or (how == "filled" and isinstance(module.get(name), list | dict | set)):
                changed.add(name)
            elif name not in found and name in module and not name.startswith("__"):
                one = module[name]
                cached = callable(one) and not isinstance(one, type | FunctionType) and hasattr(one, "__wrapped__")
                found[name] = inspect.unwrap(one) if cached else one
                if _is_own(found[name], of):
                    waiting.append(found[name])
    return {
        name: describe(_made_of(one) if _is_own(one, of) else one, (id(value), id(one) if _is_own(one, of) else 0))
        for name, one in sorted(found.items())
        if name not in changed and (_is_own(one, of) or isinstance(one, _COUNTED) or _is_record(one))
    }


def _is_own(value: Any, module: str) -> TypeGuard[type | FunctionType]:
    return isinstance(value, type | FunctionType) and value.__module__ == module


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _made_of(value: type | FunctionType) -> list[Any]:
    """Return the code of a function or class, the defaults of a function, and what their closures hold."""
    closed: dict[str, Any] = {}
    for function in _functions(value):
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name in sorted(cells.keys() - {"__class__"} - _stored(function.__code__)):
            with suppress(ValueError):  # the variable is not set yet
                closed[name] = cells[name].cell_contents
    defaults = (value.__defaults__, value.__kwdefaults__) if isinstance(value, FunctionType) else ()
    return [_code(value), closed, *defaults]


def _functions(value: type | FunctionType) -> list[FunctionType]:
    """Return a function, or those that a class defines."""
    if isinstance(value, FunctionType):
        return [value]
    return [one for each in vars(value).values() if isinstance(one := getattr(each, "__func__", each), FunctionType)]


def _stored(code: CodeType) -> set[str]:
    """Return the variables of functions around a piece of code that it changes itself."""
    inner = [_stored(one) for one in code.co_consts if isinstance(one, CodeType)]
    return {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_DEREF"}.union(*inner)


def _code(value: type | FunctionType) -> str | CodeType:
    """Return the source of a function or class; of a lambda, whose source is whole lines, what it was compiled to."""
    source = "" if "<lambda>" in value.__qualname__ else source_text(value)
    return source or getattr(value, "__code__", "")


def _globals_of(value: type | FunctionType) -> Iterator[tuple[str, str]]:
    """Yield each global name in the code of a function or class, and whether it is read, set, or perhaps filled."""
    code = _code(value)
    if isinstance(code, CodeType):
        waiting = [code]
        while waiting:
            one = waiting.pop()
            waiting += [part for part in one.co_consts if isinstance(part, CodeType)]
            for step in dis.get_instructions(one):
                if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"):
                    yield step.argval, "set" if step.opname == "STORE_GLOBAL" else "read"
        return
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed, method = node.func.value, node.func.attr
            how = "filled" if method in _FILLING else "set" if re.search("[^_]_$", method) else ""
        elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            changed, how = node.value, "set"
        else:
            continue
        while isinstance(changed, ast.Subscript | ast.Attribute):
            changed = changed.value
        if how and isinstance(changed, ast.Name):
            yield changed.id, how
    enclosed = {name for function in _functions(value) for name in function.__code__.co_freevars}
    with suppress(SyntaxError):  # such as a nonlocal variable of a function that is not in this piece
        tables = [symtable(code, "", "exec")]
        while tables:
            table = tables.pop()
            tables += table.get_children()
            is_piece = table.get_type() == "module"  # in which the function or class itself is assigned
            for symbol in table.get_symbols():
                if (is_piece or symbol.is_global()) and symbol.get_name() not in enclosed:
                    yield symbol.get_name(), "set" if symbol.is_assigned() and not is_piece else "read"
