"""PyTorch's settings of the calling program, which worker processes do not have: pinned while FedKeep computes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.errors import ConfigError, RunError

_Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any], Any]
"""How a setting is read and set, and what it is in a new process."""


_ONE_THREAD = threading.RLock()
_RUNS: list[int] = []
"""The runs, one in the other, of the thread that has `_ONE_THREAD`; empty if it only loads a model."""


@contextmanager
def one_thread_at_a_time(*, run: bool = True) -> Iterator[None]:
    """Refuse to run in two threads of a program: PyTorch's random generators and settings are one for all of them.

    ``run``: Whether this takes as long as a run; what only loads a model is waited for.
    """
    while not _ONE_THREAD.acquire(timeout=0.1):
        if _RUNS:
            raise RunError(
                "another thread of this program is in fedkeep.run, fedkeep.resume or fedkeep.tune, and PyTorch's "
                "random generators are one for all threads. Call them one after the other, or in processes of their "
                "own; load models before. machine=fedkeep.Machine(workers=4) runs four trials at a time."
            )
    try:
        _RUNS.extend([1] * run)
        yield
    finally:
        del _RUNS[len(_RUNS) - run :]
        _ONE_THREAD.release()


_SETTING = threading.Lock()
_BEFORE: list[tuple[Callable[[Any], Any], Any]] = []
_USERS: list[int] = []
"""The blocks of `plain_torch` in all threads: the last one gives back what `_BEFORE` has of the first."""


@contextmanager
def plain_torch(threads: int | None = None) -> Iterator[None]:
    """Compute as in a new process within the block, whatever the program has set, and give its settings back after.

    Results depend on these settings, and worker processes, sites and a later resume have none of them. Many threads
    slow small models down.

    ``threads``: PyTorch's number of threads; None leaves it.
    """
    device = torch.get_default_device()
    if device.type != "cpu":
        raise ConfigError(
            f"this program has set PyTorch's default device to {str(device)!r}, and worker processes would have "
            "another. Call torch.set_default_device(None) before, or leave the block `with torch.device(...)`; "
            "machine=Machine(device=...) says where FedKeep computes."
        )
    of_threads = [] if threads is None else [(torch.get_num_threads, torch.set_num_threads, threads)]
    with ExitStack() as restored:
        restored.enter_context(_global_settings_plain())
        for read, write, plain in [*_settings_of_thread(), *of_threads]:
            if (before := read()) != plain:
                restored.callback(write, before)
                write(plain)
        _leave_autocast(restored)
        restored.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        restored.enter_context(torch.inference_mode(False))
        restored.enter_context(torch.enable_grad())
        yield


@contextmanager
def _global_settings_plain() -> Iterator[None]:
    """Set what all threads share; while one of them computes, no other gives the program's settings back."""
    changed = []
    with _SETTING:
        for read, write, plain in _settings_of_all():
            if (before := read()) != plain:
                changed.append((write, before))
                write(plain)
        own, _BEFORE[:] = (changed, _BEFORE) if _USERS else ([], changed)
        _USERS.append(1)
    try:
        yield
    finally:
        with _SETTING:
            _USERS.pop()
            for write, before in reversed(own if _USERS else [*_BEFORE, *own]):
                write(before)


def set_plain_torch() -> None:
    """Set everything as in a new process, for good: after a user's code that may have changed it."""
    for read, write, plain in _settings():
        if read() != plain:
            write(plain)
    torch.set_grad_enabled(True)


def _settings() -> list[_Setting]:
    return [*_settings_of_all(), *_settings_of_thread()]


def _settings_of_thread() -> list[_Setting]:
    settings: list[_Setting] = [(_flushes_denormals, torch.set_flush_denormal, False)]
    for device in ("cpu", "cuda"):
        read, write = partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        settings.append((read, write, False))
    return settings


def _settings_of_all() -> list[_Setting]:
    backends: Any = torch.backends
    attention = backends.cuda
    settings: list[_Setting] = [
        (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
        (_anomaly, lambda both: torch.set_anomaly_enabled(*both), (False, True)),
        (_matmul_precision, torch.set_float32_matmul_precision, "highest"),
        (attention.flash_sdp_enabled, attention.enable_flash_sdp, True),
        (attention.mem_efficient_sdp_enabled, attention.enable_mem_efficient_sdp, True),
        (attention.math_sdp_enabled, attention.enable_math_sdp, True),
        (attention.cudnn_sdp_enabled, attention.enable_cudnn_sdp, True),
        _attribute(backends.cudnn, "enabled", True),
        _attribute(backends.cudnn, "benchmark", False),
        _attribute(backends.cudnn, "deterministic", False),
        _attribute(backends.mkldnn, "enabled", True),
        _attribute(backends.mkldnn, "deterministic", False),
        _attribute(backends.opt_einsum, "enabled", backends.opt_einsum.is_available()),
        _attribute(backends.opt_einsum, "strategy", "auto" if backends.opt_einsum.is_available() else None),
        (backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled, True),
        _attribute(backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", True),
        _attribute(backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", True),
    ]
    # Hooks that a program, or a library in it, has put on all modules.
    settings += [_content_of(hooks) for name, hooks in vars(nn.modules.module).items() if name.startswith("_global_")
                 and isinstance(hooks, dict)]  # fmt: skip
    # A parent comes before what it stands for where that is not set.
    for holder in (backends, backends.cuda.matmul, backends.mkldnn, backends.mkldnn.conv, backends.mkldnn.rnn):
        settings.append(_float32_of(holder, "ieee"))
    settings += [_float32_of(backends.mkldnn.matmul, "ieee"), _float32_of(backends.cudnn, "ieee")]
    settings += [_float32_of(backends.cudnn.conv, "tf32"), _float32_of(backends.cudnn.rnn, "tf32")]
    return settings


def _attribute(holder: Any, name: str, plain: Any) -> _Setting:
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value), plain


def _content_of(table: dict[Any, Any]) -> _Setting:
    def write(content: dict[Any, Any]) -> None:
        table.clear()
        table.update(content)

    return lambda: dict(table), write, {}


def _float32_of(backend: Any, plain: str) -> _Setting:
    """Return the setting of how a backend multiplies float32 numbers."""
    read = lambda: "ieee" if backend.fp32_precision == "none" else backend.fp32_precision  # noqa: E731
    return read, _attribute(backend, "fp32_precision", plain)[1], plain


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by backend, as `_float32_of` does
        return "highest"


def _leave_autocast(restored: ExitStack) -> None:
    """Count no block of autocast around this one: its cache of cast weights would outlive an update of the weights."""
    depth = torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()

    def enter_again() -> None:
        torch.clear_autocast_cache()
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()

    restored.callback(enter_again)


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _flushes_denormals() -> bool:
    """Tell whether numbers below the smallest normal one become zero, which PyTorch does not tell itself."""
    return not (torch.full((), 1e-310, dtype=torch.float64) * 0.5).item()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on a device.

    A copy from pageable memory waits for all earlier work of the GPU; a copy from pinned memory is queued instead.

    Returns: The tensor on the device; the same object if that is the CPU.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
