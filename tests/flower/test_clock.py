"""A site whose clock is not the server's learns it, which Flower tells nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fedkeep.cli import main
from fedkeep.errors import FedKeepError
from fedkeep.flower.clock import describe_clock


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
    server_ahead: int, said: str, is_borne: bool, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{server.server_port}"
    server.date = formatdate(round(time.time()) + server_ahead, usegmt=True)
    found = describe_clock(address, None)[0].replace("61 s", "60 s").replace("59 s", "60 s").replace("99 s", "100 s")
    assert said in found.replace("3599 s", "3600 s")
    assert main(["flower", "clock", address]) == int(not is_borne)
    assert ("timedatectl" in capsys.readouterr().out) is not is_borne


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
