"""What the calling program has set in PyTorch, and where it runs, changes nothing that a run computes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedkeep
from fedkeep._utils.torch_state import _settings, one_thread_at_a_time, plain_torch
from fedkeep.data.cache import cache_folder
from fedkeep.errors import ConfigError
from fedkeep.models.weights import tensor_hash


@contextmanager
def setting(write: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    write(value)
    try:
        yield
    finally:
        write(before)


def of(holder: Any, name: str, value: Any) -> AbstractContextManager[None]:
    return setting(lambda given: setattr(holder, name, given), value, getattr(holder, name))


@contextmanager
def doubled_outputs() -> Iterator[None]:
    with nn.modules.module.register_module_forward_hook(lambda module, given, output: output * 2):
        yield


backends: Any = torch.backends
AMBIENT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "float64": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16 products": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
    "bfloat16 products by backend": lambda: of(backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "no mkldnn": lambda: of(backends.mkldnn, "enabled", False),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "denormals": lambda: setting(torch.set_flush_denormal, True, False),
    "hooks on all modules": doubled_outputs,
    "attention in parts": lambda: setting(backends.mha.set_fastpath_enabled, False, True),
    "errors of numpy": lambda: np.errstate(all="raise"),
}


def state() -> list[Any]:
    return [read() for read, _, _ in _settings()]


def trained(**changes: Any) -> list[str]:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(40, 4)).astype(np.float32), np.arange(40) % 3
    run = fedkeep.run(
        data=(x[:30], y[:30], x[30:], y[30:]),
        partition=fedkeep.IID(num_clients=3),
        model="mlp",
        methods="fedavg",
        rounds=2,
        cohort_size=2,
        seeds=1,
        training=fedkeep.SGD(lr=0.1, batch_size=8),
        **changes,
    )
    return [tensor_hash(tensor) for tensor in run["FedAvg", 0].model().state_dict().values()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return trained(out=tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize("name", AMBIENT)
def test_what_the_program_has_set_changes_nothing_and_is_given_back(
    name: str, expected: list[str], tmp_path: Path
) -> None:
    with AMBIENT[name]():
        before, grad, inference = state(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found = trained(out=tmp_path / "run")
        assert (state(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (before, grad, inference)
    assert found == expected


def test_within_the_block_all_is_as_in_a_new_process() -> None:
    with doubled_outputs(), setting(backends.mha.set_fastpath_enabled, False, True), plain_torch():
        assert [read() for read, _, _ in _settings()] == [plain for _, _, plain in _settings()]
        assert torch.equal(nn.Identity()(torch.ones(1)), torch.ones(1))


def test_the_last_of_two_threads_gives_the_settings_back() -> None:
    """A prediction that began first and ends first leaves a run's settings plain."""
    began, ended, seen = threading.Event(), threading.Event(), list[torch.dtype]()

    def predict() -> None:
        with plain_torch():
            began.set()
            ended.wait(60)

    with setting(torch.set_default_dtype, torch.float64, torch.float32):
        thread = threading.Thread(target=predict)
        thread.start()
        began.wait(60)
        with plain_torch():
            ended.set()
            thread.join()
            seen.append(torch.get_default_dtype())
        seen.append(torch.get_default_dtype())
    assert seen == [torch.float32, torch.float64]


def test_threads_that_load_models_wait_for_each_other() -> None:
    found = []

    def load() -> None:
        with one_thread_at_a_time(run=False):
            time.sleep(0.4)
            found.append(1)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4


def test_another_default_device_is_refused_by_name(tmp_path: Path) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match="default device to 'meta'"):
        trained(out=tmp_path / "run")


def test_autocast_inside_forgets_its_cast_weights() -> None:
    """A cache that outlives an update would freeze the training."""
    layer = nn.Linear(2, 2)
    outputs = []
    with torch.autocast("cpu", dtype=torch.bfloat16), plain_torch():
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs.append(layer(torch.ones(1, 2)))
            with torch.no_grad():
                layer.weight += 1
    assert not torch.equal(*outputs)


def without_home(tmp_path: Path, code: str) -> str:
    program = (
        "import pwd\ndef nobody(uid): raise KeyError(uid)\npwd.getpwuid = nobody\n"
        f"from fedkeep.data.cache import cache_folder\n{code}"
    )
    names = ("HOME", "XDG_CACHE_HOME", "FEDKEEP_CACHE", "FEDKEEP_DATA", "USERPROFILE")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=clean | {"TMPDIR": str(tmp_path)},
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no list of users")
@pytest.mark.parametrize("chosen", [pytest.param(None, marks=pytest.mark.slow), "~/caches"])
def test_without_a_home_the_cache_is_in_the_temporary_folder(tmp_path: Path, chosen: str | None) -> None:
    code = f"import os\nif {chosen!r}: os.environ['FEDKEEP_CACHE'] = {chosen!r}\nprint(cache_folder())"
    assert Path(without_home(tmp_path, code)).parent == tmp_path


def test_a_chosen_cache_folder_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


@pytest.mark.parametrize(
    "backend",
    [
        "module://nowhere.backend",
        pytest.param("QtAgg", marks=pytest.mark.slow),
        pytest.param("module://matplotlib_inline.backend_inline", marks=pytest.mark.slow),
        pytest.param("nosuch", marks=pytest.mark.slow),
    ],
)
def test_figures_are_drawn_with_any_backend(tmp_path: Path, backend: str) -> None:
    program = (
        "import sys\nfrom fedkeep.reporting.figures import curves\nfrom fedkeep.results import _svg\n"
        "sys.stdout.write(_svg(curves([], 'accuracy')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "MPLBACKEND": backend},
        check=False,
    )
    assert done.stdout.startswith("<svg"), done.stderr
