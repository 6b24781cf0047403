"""Import the user's own methods, reply steps, models and partition schemes from files and modules."""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm
from fedkeep.interface.algorithm import client_steps
from fedkeep.interface.method_checks import check_method
from fedkeep.losses.classification import OWN_LOSSES
from fedkeep.models.own_code import describe, functions_of

T = TypeVar("T")
_PREFIX = "fedkeep_used_"
"""What the names of modules begin with that were imported from files."""


_MODULES: dict[str, ModuleType] = {}
"""The modules that the user named."""
_DIGESTS: dict[str, str] = {}
"""Of each of `OWN_LOSSES` the digest when it was given: what training changes in it makes it no other loss."""


def import_user_code(names: Iterable[str]) -> None:
    """Import files and modules, whose classes are then available by name.

    Pass only names that the user has typed, never names from a recipe.

    ``names``: Files such as ``folder/method.py`` or modules such as ``package.module``.
    """
    stems: dict[str, Path] = {}
    for name in names:
        path = Path(name).expanduser()
        if path.suffix == ".py" and stems.setdefault(path.stem, path).resolve() != path.resolve():
            raise ConfigError(f"--use: {stems[path.stem]} and {path} have one name. Rename one of them.")
        if path.suffix == ".py":
            _import_file(path)
        else:
            try:
                _MODULES[name] = importlib.import_module(name)
                _check_methods(_MODULES[name])
            except ModuleNotFoundError as error:
                if error.name is not None and not name.startswith(error.name):
                    raise
                raise ConfigError(
                    f"--use {name}: there is no such module. Give a path to a .py file, or install it."
                ) from error


def keep_loss(loss: Any) -> str:
    """Keep a loss that was given in Python, and return its name in recipes."""
    if isinstance(loss, str):
        return loss
    if not callable(loss):
        raise ConfigError(f"loss must be a function of logits and labels, or a torch.nn.Module, not {loss!r:.60}.")
    of = loss if why_not_importable(loss) is None else type(loss)
    name = f"{of.__module__}.{of.__qualname__}" if of is loss else f"given.{getattr(loss, '__name__', of.__name__)}"
    OWN_LOSSES[name], _DIGESTS[name] = loss, _digest(loss)
    return name


def find_loss(name: str, device: torch.device) -> None:
    """Find what ``training.loss`` names, of what the user gave or named with ``--use``."""
    if name == "cross-entropy":
        return
    module, _, function = name.rpartition(".")
    held = sys.modules.get(f"{_PREFIX}{module.removeprefix(_PREFIX)}") or _MODULES.get(module)
    if module == "__main__":
        held = sys.modules.get("__mp_main__")  # what worker processes call the program that began them
    found = OWN_LOSSES[name] if name in OWN_LOSSES else getattr(held, function, None)
    if not callable(found):
        raise ConfigError(
            f"training.loss = {name!r} is not known here. Write module.function, with --use module or --use module.py; "
            "or give the loss in Python, loss=...; a resume too needs it."
        )
    if name not in OWN_LOSSES:
        _DIGESTS[name] = _digest(found)
    made = found() if isinstance(found, type) else found
    OWN_LOSSES[name] = made.to(device) if isinstance(made, nn.Module) else made


def describe_loss(name: str) -> str:
    """Return the digest of what the user gave as a loss: its code, and its numbers when it was given.

    Empty where nothing was given, and for what cannot be looked into.
    """
    return _DIGESTS.get(name, "") if name in OWN_LOSSES else ""


def describe_reply_step(step: Any) -> str:
    """Return the digest of a reply step that was given in Python, as it is before the first round."""
    return f"{type(step).__qualname__} {_digest(step)}"


def _digest(value: Any) -> str:
    with suppress(Exception):  # such as a compiled module, or a function whose variables are not set yet
        return _short(repr(describe(value)).encode())
    return ""


def describe_method(cls: type) -> dict[str, str]:
    """Return the digest of a method of the user's: of its files, or of the source of one of the program itself."""
    parts = []
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in {"fedkeep", *sys.stdlib_module_names}:
            file = _file_of(sys.modules.get(base.__module__))
            own = base.__module__ != "__main__" and file is not None and file.is_file()
            parts.append(file.read_bytes() if file is not None and own else repr(describe(base)).encode())
    return {"source" if cls.__module__ == "__main__" else "file": _short(b"".join(parts))} if any(parts) else {}


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def source_of(name: str) -> Path:
    """Return the file of a name that `import_user_code` has imported."""
    return Path(str(_module_of(name).__file__)).resolve()


def _module_of(name: str) -> ModuleType:
    return sys.modules[f"{_PREFIX}{Path(name).stem}" if name.endswith(".py") else name]


def code_of(names: Iterable[str], *, main: bool = False) -> dict[str, Path]:
    """Return the files of imported user code, by names for copies: those given, and what they import.

    Of what they import, only the user's own is there, not what was installed. With ``main``, so is the program.
    """
    found: dict[Path, str] = {}
    waiting = [(source_of(name), Path(name).name if name.endswith(".py") else "") for name in names]
    if main and (file := getattr(sys.modules["__main__"], "__file__", None)):
        waiting.append((Path(file).resolve(), "__main__.py"))
    by_file = {file: m for m in [*sys.modules.values()] if (file := _file_of(m))} if waiting else {}
    while waiting:
        path, name = waiting.pop(0)
        if path in found or path.suffix != ".py" or not path.is_file():
            continue
        module = by_file.get(path)
        if not name and module is not None:
            name = module.__name__.removeprefix(_PREFIX).replace(".", "/") + (
                "/__init__.py" if path.name == "__init__.py" else ".py"
            )
        copies = sum(other.rpartition("/")[2] == name for other in found.values())
        found[path] = f"{copies + 1}/{name}" if copies else name
        if module is not None:
            waiting += [(file, "") for file in map(_file_of, _imported_by(module, path)) if file and _is_own(file)]
    return {name: path for path, name in found.items()}


@cache  # thousands of modules are loaded, and every run asks for all of them
def _without_links(file: str) -> Path:
    return Path(file).resolve()


def _file_of(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return _without_links(os.path.abspath(str(file))) if file else None


def _imported_by(module: ModuleType, path: Path) -> list[ModuleType]:
    """Return the modules that a module's source imports, as far as they are loaded, with the packages around them."""
    package = module.__package__ or ""
    names = [module.__name__]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):  # else it failed, and was caught
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package or None)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    parts = [name.split(".") for name in names]
    wanted = dict.fromkeys(".".join(part[:length]) for part in parts for length in range(1, len(part) + 1))
    return [sys.modules[name] for name in wanted if name in sys.modules]


def _is_own(file: Path) -> bool:
    """Tell whether a module's file is the user's: it was not installed, and is not of Python or FedKeep."""
    places = [*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(__file__).parents[1])]
    return not any(file.is_relative_to(_without_links(place)) for place in places)


def why_not_importable(value: Any, *, elsewhere: bool = False) -> str | None:
    """Return why another process cannot import a class or function by its name; None if it can.

    ``elsewhere``: Whether the process is on another machine, where the main program is another.
    Returns: Such as ``Net is defined in a notebook``.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None:
        return f"{value!r:.60} is an object, not a class or function of a file"
    if "<lambda>" in name:
        return "a lambda has no name"
    if "<" in name:
        return f"{name.rpartition('.')[2]} is defined inside a function"
    if module == "__main__" and not _is_of_main_file(value):
        return f"{name} is defined in a notebook or an interactive session"
    if module == "__main__" and elsewhere:
        return f"{name} is defined in the script that was started, and nodes of a Ray cluster import only modules"
    return None


def _is_of_main_file(value: Any) -> bool:
    """Tell whether a class or function of the main program is from a file that workers import, and not from a cell."""
    main = sys.modules["__main__"]
    file, name = getattr(main, "__file__", None) or "", getattr(getattr(main, "__spec__", None), "name", "")
    if not os.path.isfile(file) or f".{name}".endswith(".__main__"):
        return False
    codes = (getattr(inspect.unwrap(function), "__code__", None) for function in functions_of(value))
    files = {code.co_filename for code in codes if code is not None}
    return all(os.path.isfile(one) or one.startswith(("<string>", "<attrs ", "<frozen ")) for one in files)


def modules_of(values: Iterable[Any]) -> list[str]:
    """Return what `import_user_code` has to import so that classes of the user's exist in another process.

    ``values``: Classes, which `why_not_importable` passes.
    Returns: Modules and files, without the main program, which Python imports itself.
    """
    found: dict[str, None] = {}
    for value in values:
        module = sys.modules.get(value.__module__)
        if module is None or value.__module__ == "__main__":
            continue
        imported_from = str(module.__file__) if value.__module__.startswith(_PREFIX) else value.__module__
        found[imported_from] = None
    return list(found)


def _check_methods(module: ModuleType) -> None:
    """Check the methods that a module defines; one that others are derived from need not be complete."""
    for value in vars(module).values():
        if not (isinstance(value, type) and issubclass(value, Algorithm) and value.__module__ == module.__name__):
            continue
        complete = client_steps(value) and not getattr(value, "__abstractmethods__", None)
        if complete or not value.__subclasses__():
            check_method(value)


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"--use {path}: there is no such file.")
    name, file = f"{_PREFIX}{path.stem}", path.resolve()
    if _file_of(sys.modules.get(name)) == file:
        return
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # it may import what stands beside it; behind all that is installed
    alias = path.stem if path.stem.isidentifier() and path.stem != "__main__" and _is_found(path.stem, file) else name
    loaded, spec = sys.modules.get(alias), importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    by_another = loaded is not None and _file_of(loaded) == file  # another file has imported it
    module = loaded if loaded is not None and by_another else importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[alias] = module
    try:
        if not by_another:
            spec.loader.exec_module(module)
            _check_imports(module, path)
        _check_methods(module)
    except BaseException as error:
        for each in {name, alias}:
            del sys.modules[each]  # otherwise a second import would seem to succeed
        if isinstance(error, ModuleNotFoundError) and error.name:
            missing = (
                f"--use {path}: it, or what it imports, needs {error.name!r}, which is not beside it nor installed."
            )
            raise ConfigError(missing) from error
        raise


def _check_imports(module: ModuleType, path: Path) -> None:
    """Raise `ConfigError` if a file, or what it imports, got something else than what stands beside it by that name."""
    waiting, seen = [(module, path.resolve())], {path.resolve()}
    while waiting:
        for used in _imported_by(*waiting.pop()):
            found, name = _file_of(used), used.__name__.removeprefix(_PREFIX)
            if found is None or found in seen or found.suffix != ".py" or not _is_own(found):
                continue
            place = path.resolve().parent.joinpath(*name.split("."))
            beside = place / found.name if found.name == "__init__.py" else place.with_name(f"{place.name}.py")
            if beside != found and beside.is_file() and beside.read_bytes() != found.read_bytes():
                raise ConfigError(
                    f"--use {path}: it imports {name!r}, and gets {found}, not {beside}. Rename one of them."
                )
            seen.add(found)
            waiting.append((used, found))


def _is_found(name: str, file: Path) -> bool:
    """Tell whether an import of a name would find a file."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module of that name was made without a file
        return False
    return spec is not None and bool(spec.origin) and Path(str(spec.origin)).resolve() == file


def instances_of(base: type[T], names: Iterable[str]) -> list[T]:
    """Return new objects, one of each class with this base that `import_user_code` found in files and modules."""
    defined = ((module, value) for module in map(_module_of, names) for value in vars(module).values())
    classes = [cls for module, cls in defined if isinstance(cls, type) and cls.__module__ == module.__name__]
    found = []
    for cls in (cls for cls in classes if issubclass(cls, base)):
        try:
            found.append(cls())
        except TypeError as error:
            raise ConfigError(f"--use: {cls.__name__} is made without arguments: {error}. Give defaults.") from error
    return found
