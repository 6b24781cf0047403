"""A site whose clock is not the server's learns it, which Flower tells nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fedkeep.cli import flower, main
from fedkeep.cli.flower import AHEAD, BEHIND, describe_clock
from fedkeep.errors import FedKeepError


class Server(HTTPServer):
    date: str | None = None


class Handler(BaseHTTPRequestHandler):
    """Answers like the SuperLink's proxy: with an error, and with its time."""

    server: Server

    def do_GET(self) -> None:
        self.send_response_only(404)
        if self.server.date is not None:
            self.send_header("Date", self.server.date)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("server_ahead", "said", "is_borne"),
    [
        (0, "near enough", True),
        (-60, "60 s ahead of", False),
        (100, "100 s behind", True),
        (3600, "3600 s behind", False),
    ],
)
def test_the_clock_is_named(
    server_ahead: int,
    said: str,
    is_borne: bool,
    server: Server,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flower.time, "time", lambda: 1_800_000_000.5)
    server.date = formatdate(1_800_000_000 + server_ahead, usegmt=True)
    assert main(["flower", "clock", f"127.0.0.1:{server.server_port}"]) == int(not is_borne)
    output = " ".join(capsys.readouterr().out.split())
    assert said in output
    assert ("timedatectl" in output) is not is_borne


@pytest.mark.parametrize("date", [None, "yesterday"])
def test_a_server_that_tells_no_time_is_named(date: str | None, server: Server) -> None:
    server.date = date
    with pytest.raises(FedKeepError, match="does not tell the time"):
        describe_clock(f"127.0.0.1:{server.server_port}", None)


@pytest.mark.parametrize("address", ["127.0.0.1", ":80", "host:x", "host:99999"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(FedKeepError, match="is no address"):
        describe_clock(address, None)


def test_a_server_that_is_not_there_is_named(server: Server) -> None:
    port = server.server_port + 1 if server.server_port < 65535 else 1
    with pytest.raises(FedKeepError, match=r"does not (answer|tell the time)"):
        describe_clock(f"127.0.0.1:{port}", None)
    with pytest.raises(FedKeepError, match="--root-certificates nowhere"):
        describe_clock(f"127.0.0.1:{port}", "nowhere.crt")


def test_the_limits_are_those_of_flower() -> None:
    constant = pytest.importorskip("flwr.common.constant")
    assert constant.SYSTEM_TIME_TOLERANCE == AHEAD
    assert constant.SYSTEM_TIME_TOLERANCE + constant.TIMESTAMP_TOLERANCE == BEHIND
