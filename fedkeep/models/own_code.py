"""What tells the user's own networks, losses and methods from others, so that a resumed run notices a changed one."""

import ast
import dis
import functools
import hashlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from symtable import symtable
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedkeep.models.weights import tensor_hash

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PLAIN = (int, float, complex, str, bytes, type(None))
_HOLDING = (tuple, list, set, frozenset, Mapping)
_COUNTED = (*_PLAIN, *_HOLDING, Tensor, np.ndarray, nn.Module, functools.partial)
"""The kinds of globals that count; a module or another object says too little of itself, or too much."""
_CHANGING = {"append", "extend", "insert", "update", "setdefault", "add", "pop", "clear", "remove", "discard"}


def source_text(value: Any) -> str:
    """Return the code of a class or function without comments and layout; empty where Python does not know it."""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(value))))
    except (OSError, TypeError, SyntaxError):
        return ""


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
    if isinstance(value, type | FunctionType) and value.__module__.startswith(("torch.", "fedkeep.")):
        return f"{value.__module__}.{value.__qualname__}"
    parts: Any
    if isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, MethodType):
        owner = value.__self__
        parts = value.__func__, owner if callable(owner) else getattr(owner, "__dict__", ())
    elif isinstance(value, FunctionType):
        closed = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = _code(value), closed, value.__defaults__, value.__kwdefaults__, globals_read(value)
    elif isinstance(value, CodeType):
        parts = value.co_code.hex(), value.co_names, value.co_consts
    elif isinstance(value, type):
        parts = source_text(value), globals_read(value), *value.__bases__
    elif isinstance(value, Mapping):
        parts = [*value.items()]
    elif isinstance(value, nn.Module):
        parts = type(value), own_attributes(value) | value._parameters | value._buffers | value._modules
    elif isinstance(value, tuple | list):
        parts = value
    elif type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:  # an object of the user's class
        parts = type(value), value.__getstate__()
    else:
        return sorted(map(repr, value)) if isinstance(value, set | frozenset) else ADDRESS.sub("", repr(value))
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
    read: set[str] = set()
    changed: set[str] = set()
    waiting = [value]
    while waiting:
        for name, is_set in _globals_of(waiting.pop()):
            if is_set:
                changed.add(name)
            elif name not in read and not name.startswith("__"):
                read.add(name)
                found = module.get(name)
                if isinstance(found, type | FunctionType) and found.__module__ == of:
                    waiting.append(found)
    described: dict[str, Any] = {}
    for name in sorted((read - changed) & module.keys()):
        found = module[name]
        if isinstance(found, type | FunctionType) and found.__module__ == of:
            described[name] = describe(_code(found))
        elif isinstance(found, _COUNTED):
            described[name] = describe(found, (id(value),))
    return described


def _code(value: type | FunctionType) -> str | CodeType:
    """Return the source of a function or class; of a lambda, whose source is whole lines, what it was compiled to."""
    source = "" if "<lambda>" in value.__qualname__ else source_text(value)
    return source or getattr(value, "__code__", "")


def _globals_of(value: type | FunctionType) -> Iterator[tuple[str, bool]]:
    """Yield each global name in the code of a function or class, and whether the code changes it."""
    code = _code(value)
    if isinstance(code, CodeType):
        waiting = [code]
        while waiting:
            one = waiting.pop()
            waiting += [part for part in one.co_consts if isinstance(part, CodeType)]
            for step in dis.get_instructions(one):
                if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"):
                    yield step.argval, step.opname == "STORE_GLOBAL"
        return
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Subscript | ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if isinstance(node.ctx, ast.Store) or (isinstance(node, ast.Attribute) and node.attr in _CHANGING):
            yield node.value.id, True
    with suppress(SyntaxError):  # such as a nonlocal variable of a function that is not in this piece
        tables = [symtable(code, "", "exec")]
        while tables:
            table = tables.pop()
            tables += table.get_children()
            for symbol in table.get_symbols():
                if table.get_type() == "module" or symbol.is_global():
                    yield symbol.get_name(), symbol.is_assigned()
