"""A federation on this machine as it would be on several: a SuperLink with TLS and node authentication, and SuperNodes.

Each part has a folder of its own, and a network namespace of its own where that is asked for (as root, on Linux). All
commands are those of docs/deploy.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
PORT = 8000
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "OMP_NUM_THREADS": "1",
    "NO_COLOR": "1",
    "COLUMNS": "200",
}


@dataclass
class Host:
    """A part's place: its folder, its address, and how commands get there."""

    folder: Path
    address: str
    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def command(self, *words: str) -> list[str]:
        own = BIN / words[0]  # nginx may be the system's
        return [*self.prefix, str(own if own.exists() else words[0]), *words[1:]]

    def start(self, *words: str, log: str = "log", again: bool = False) -> subprocess.Popen[bytes]:
        """Start a command that stays; with ``again`` it is started again whenever it ends, as a service would be."""
        command = self.command(*words)
        if again:
            command = ["sh", "-c", 'while true; do "$@"; sleep 5; done', "sh", *command]
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, *words: str, check: bool = True, timeout: float = 60) -> str:
        """Run a command to its end and return what it said."""
        self.folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)} failed with code {done.returncode}:\n{done.stdout}")
        return done.stdout

    def log(self, name: str = "log") -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def crash(self) -> None:
        """Kill all that runs here, but for the loop that starts it again."""
        if self.process is not None:
            kill_all(descendants(self.process.pid))

    def kill(self) -> None:
        """Kill the part and all that it started, as a power cut would."""
        if self.process is not None:
            kill_all([self.process.pid, *descendants(self.process.pid)])
            self.process.wait()
            self.process = None

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join((str(BIN), os.environ.get("PATH", "")))  # Flower looks for its own commands there
        return {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(self.folder / "flwr"), **self.environment}


class Federation:
    """A SuperLink and its sites.

    Parameters
    ----------
    folder : where everything is written. sites : their names.
    namespaces : give each part a network namespace of its own.
    port : of the SuperLink; without namespaces the nodes' own ports follow it.
    """

    def __init__(self, folder: Path, sites: list[str], *, namespaces: bool = False, port: int = PORT) -> None:
        self.folder = folder
        self.port = port
        self.namespaces = namespaces
        names = ["link", *sites]
        self.hosts = {name: self._host(name, number) for number, name in enumerate(names, start=1)}
        self.link = self.hosts["link"]
        self.proxy = Host(folder / "proxy", self.link.address, self.link.prefix)
        self.sites = {name: self.hosts[name] for name in sites}

    @property
    def superlink(self) -> str:
        """The address that sites know, which is the proxy's."""
        return f"{self.link.address}:{self.port}"

    @property
    def control(self) -> str:
        """The SuperLink's own address, which only its own machine reaches."""
        return f"127.0.0.1:{self.port + 1}"

    def add(self, name: str) -> Host:
        """Add a host that is no site of the federation."""
        host = self.hosts[name] = self._host(name, len(self.hosts) + 1)
        if self.namespaces:
            _connect(name, host.address)
        return host

    def make_keys(self, sites: list[str], folder: str = "keys") -> Path:
        keys = self.folder / folder
        hosts = ",".join(dict.fromkeys([self.link.address, "127.0.0.1"]))
        self.link.run("fedkeep", "flower", "keys", str(keys), "--sites", ",".join(sites), "--hosts", hosts)
        return keys

    def start_superlink(self) -> None:
        keys = self.folder / "keys"
        self.link.process = self.link.start(
            "flower-superlink",
            *("--host", "127.0.0.1", "--port", str(self.port + 1)),
            *("--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "superlink.crt")),
            *("--ssl-keyfile", str(keys / "superlink.key"), "--enable-supernode-auth"),
            *("--database", "state.db", "--disable-runtime-dependency-installation"),
        )
        self.connect(self.link, self.control)
        wait_for("the SuperLink", lambda: self._nodes() is not None, 90)

    def start_proxy(self) -> None:
        """Start nginx with the guide's configuration, at other addresses."""
        text = (Path(__file__).parents[2] / "docs" / "nginx.conf").read_text()
        text = text.replace("0.0.0.0:8000", self.superlink).replace("127.0.0.1:8001", self.control)
        (self.folder / "nginx.conf").write_text(text)
        place = ("-p", str(self.folder), "-c", str(self.folder / "nginx.conf"))
        self.proxy.process = self.proxy.start("nginx", *place, "-g", "daemon off;")

    def connect(self, host: Host, address: str) -> None:
        """Tell a host's `flwr` where the SuperLink is."""
        connection = host.folder / "flwr" / "config.toml"
        connection.parent.mkdir(parents=True, exist_ok=True)
        authority = self.folder / "keys" / "ca.crt"
        connection.write_text(
            f'[superlink]\ndefault = "study"\n\n[superlink.study]\naddress = "{address}"\n'
            f'root-certificates = "{authority}"\n'
        )

    def register(self, site: str) -> None:
        self.link.run("flwr", "supernode", "register", str(self.folder / "keys" / f"{site}.pub"), "--name", site)

    def start_supernode(self, name: str, config: str, *, keys: str | None = "keys", again: bool = True) -> None:
        """Start a SuperNode, with its key from a folder, or without one."""
        host, number = self.hosts[name], list(self.hosts).index(name)
        own = () if keys is None else ("--auth-supernode-private-key", str(self.folder / keys / f"{name}.key"))
        port = 9094 if self.namespaces else self.port + 1 + number
        host.process = host.start(
            "flower-supernode",
            *("--superlink", self.superlink, "--root-certificates", str(self.folder / "keys" / "ca.crt")),
            *own,
            *("--port", str(port), "--node-config", config),
            again=again,
        )

    def start_run(self, app: Path, config: str = "") -> subprocess.Popen[bytes]:
        words = ("--run-config", config) if config else ()
        return self.link.start("flwr", "run", str(app), "--stream", *words, log="run.log")

    def online(self) -> int:
        """Return how many nodes the SuperLink has online."""
        return sum(node["status"] == "online" for node in self._nodes() or [])

    def _nodes(self) -> list[dict[str, str]] | None:
        """Return what the SuperLink knows of its nodes; None if it does not answer."""
        output = self.link.run("flwr", "supernode", "list", "--format", "json", check=False)
        try:
            nodes: list[dict[str, str]] = json.loads(output[output.index("{") :])["nodes"]
        except (ValueError, KeyError):
            return None
        return nodes

    def stop(self) -> None:
        for host in (self.proxy, *self.hosts.values()):
            host.kill()
        if self.namespaces:
            for name in self.hosts:
                subprocess.run(["ip", "netns", "del", _namespace(name)], check=False, capture_output=True)

    def _host(self, name: str, number: int) -> Host:
        folder = self.folder / name
        if not self.namespaces:
            return Host(folder, "127.0.0.1")
        return Host(folder, f"10.77.0.{number}", ("ip", "netns", "exec", _namespace(name)))


@contextmanager
def federation(folder: Path, sites: list[str], *, namespaces: bool = False, port: int = PORT) -> Iterator[Federation]:
    """Give a federation whose network is up, and take everything down in the end."""
    result = Federation(folder, sites, namespaces=namespaces, port=port)
    try:
        if namespaces:
            _lay_network(result)
        yield result
    finally:
        result.stop()


@contextmanager
def simulation(folder: Path, port: int) -> Iterator[Host]:
    """Give a place whose ``flwr`` has a SuperLink of Flower's simulation, and take that down in the end."""
    host = Host(folder / "simulation", "127.0.0.1")
    connection = host.folder / "flwr" / "config.toml"
    connection.parent.mkdir(parents=True, exist_ok=True)
    connection.write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    host.process = host.start("flower-superlink", "--insecure", "--simulation", "--port", str(port))
    try:
        ready = lambda: '"success": true' in host.run("flwr", "ls", "--format", "json", check=False)  # noqa: E731
        wait_for("the SuperLink of the simulation", ready, 90)
        yield host
    finally:
        host.kill()


def simulate(folder: Path, app: Path, nodes: int, config: str, port: int) -> str:
    """Run an app in Flower's simulation, and return what was said."""
    with simulation(folder, port) as host:
        size = f"num-supernodes={nodes} client-resources-num-cpus=1"
        words = ("flwr", "run", str(app), "--stream", "--federation-config", size, "--run-config", config)
        return host.run(*words, timeout=600)


def wait_for(what: str, holds: Callable[[], Any], seconds: float) -> Any:
    """Wait until something holds, and return it; raise TimeoutError if it does not in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := holds():
            return found
        time.sleep(0.3)
    raise TimeoutError(f"waited {seconds:.0f} s for {what}")


def kill_all(processes: Iterable[int]) -> None:
    """Kill processes by their ids, those that are still there."""
    for pid in processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def descendants(root: int) -> list[int]:
    """Return the ids of all processes below one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def command_of(pid: int) -> str:
    """Return a process's command line; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _namespace(name: str) -> str:
    return f"fk{os.getpid()}-{name}"


def _lay_network(result: Federation) -> None:
    """Make a namespace for each host; the SuperLink's holds the bridge to which the others are connected."""
    link = _namespace("link")
    _ip("netns", "add", link)
    _ip("-n", link, "link", "set", "lo", "up")
    _ip("-n", link, "link", "add", "br0", "type", "bridge")
    _ip("-n", link, "addr", "add", f"{result.link.address}/24", "dev", "br0")
    _ip("-n", link, "link", "set", "br0", "up")
    for name, host in result.sites.items():
        _connect(name, host.address)


def _connect(name: str, address: str) -> None:
    link, own = _namespace("link"), _namespace(name)
    _ip("netns", "add", own)
    _ip("-n", own, "link", "set", "lo", "up")
    _ip("-n", link, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", own)
    _ip("-n", link, "link", "set", f"to-{name}", "master", "br0", "up")
    _ip("-n", own, "addr", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", own, "link", "set", "eth0", "up")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()} (namespaces need root and iproute2)")
