"""The proxies before the SuperLink: what nodes send gets through as it is; all else, and too much, is refused."""

from __future__ import annotations

import asyncio
import datetime
import logging
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx
import uvicorn
from uvicorn.server import ServerState

from fedkeep.cli import main
from fedkeep.errors import ConfigError
from fedkeep.flower import keys as keys_module
from fedkeep.flower.keys import make_keys, warn_before_expiry
from fedkeep.flower.nginx import nginx_configuration
from fedkeep.flower.path_proxy import _HTTP, Limits, PathProxy, start_proxy

HEAD = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\n"
WHOLE = HEAD + b"content-length: 2\r\n\r\nok"
Connect = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
Attack = Callable[[Connect], Awaitable[None]]


class Body(httpx.AsyncByteStream):
    """A reply that comes in two parts."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"reply"
        yield b"\2"


def through(path: str, superlink: httpx.AsyncBaseTransport, raw: bytes | None = None) -> httpx.Response:
    """Send a request to the proxy, as a node would."""

    async def ask() -> httpx.Response:
        proxy = PathProxy("127.0.0.1:8001", httpx.AsyncClient(transport=superlink))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(proxy)) as node:
            request = node.build_request(
                "POST", "https://fl.example.org:8000/", content=b"\0\1body", headers={"x-key": "k"}
            )
            request.url = request.url.copy_with(raw_path=raw or path.encode())
            return await node.send(request)

    return asyncio.run(ask())


def test_what_nodes_send_gets_through() -> None:
    seen: list[httpx.Request] = []

    def superlink(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(201, stream=Body(), headers={"x-own": "v", "content-type": "application/x"})

    reply = through("/v1/fleet/pull-messages", httpx.MockTransport(superlink))
    assert (reply.status_code, reply.content, reply.headers["x-own"]) == (201, b"reply\2", "v")
    assert str(seen[0].url) == "https://127.0.0.1:8001/v1/fleet/pull-messages"
    assert (seen[0].content, seen[0].headers["x-key"], seen[0].method) == (b"\0\1body", "k", "POST")
    assert seen[0].headers["host"] == "127.0.0.1:8001"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/register-node",
        "/v1/runtime/push-messages",
        "/health",
        "/",
        "/v1/fleet/",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/pull-messages?x=/v1/control",
        "//v1/fleet/pull-messages",
        "/v1/fleet/pull-messages%0d%0a",
    ],
)
def test_everything_else_is_refused(path: str) -> None:
    def superlink(request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"{request.url} got through")

    assert through(path, httpx.MockTransport(superlink)).status_code == 403


def test_a_superlink_that_is_away_is_told_as_such() -> None:
    def superlink(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert through("/v1/fleet/pull-messages", httpx.MockTransport(superlink)).status_code == 503


async def echo(request: httpx.Request) -> httpx.Response:
    body = await request.aread()
    return httpx.Response(200, stream=httpx.ByteStream(body), headers={"content-length": str(len(body))})


def against(
    limits: Limits, attack: Callable[[Connect], Awaitable[None]], context: ssl.SSLContext | None = None
) -> None:
    """Let an attack act on a listening proxy."""

    async def run_once() -> None:
        app = PathProxy("x:1", httpx.AsyncClient(transport=httpx.MockTransport(echo)), limits.body_bytes)
        server = await start_proxy("127.0.0.1", 0, app, context, limits)
        port = server.sockets[0].getsockname()[1]

        def connect(address: str = "127.0.0.1") -> Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
            return asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))

        await attack(connect)
        server.close()

    asyncio.run(asyncio.wait_for(run_once(), 20))


async def answer(reader: asyncio.StreamReader, seconds: float = 10) -> bytes:
    """Return a reply's first line; nothing if the connection was closed, a word if it is open and says nothing."""
    try:
        return await asyncio.wait_for(reader.readline(), seconds)
    except TimeoutError:
        return b"waits"
    except ConnectionError:
        return b""


async def served(connect: Connect, address: str = "127.0.0.1") -> bool:
    reader, writer = await connect(address)
    writer.write(WHOLE)
    line = await answer(reader)
    writer.close()
    return line.startswith(b"HTTP/1.1 200")


def test_a_thousand_half_open_requests_of_one_address_disturb_nobody_else() -> None:
    async def attack(connect: Connect) -> None:
        flood = [await connect("127.0.0.2") for _ in range(1000)]
        for _, writer in flood:
            writer.write(HEAD)
        began = time.monotonic()
        assert await served(connect)
        assert time.monotonic() - began < 2
        refused = [await answer(reader) for reader, _ in flood[8:]]
        assert refused == [b""] * 992
        assert not await served(connect, "127.0.0.2"), "its eight connections are open still"
        flood[0][1].close()
        await asyncio.sleep(0.1)
        assert await served(connect, "127.0.0.2"), "a closed connection counts no more"

    against(Limits(connections=8), attack)


def test_half_open_requests_of_many_addresses_are_cut() -> None:
    async def attack(connect: Connect) -> None:
        flood = [await connect(f"127.0.1.{1 + number % 250}") for number in range(1000)]
        for _, writer in flood:
            writer.write(HEAD)
        assert await served(connect)
        for _ in range(4):  # a byte now and then prolongs nothing
            await asyncio.sleep(0.1)
            for _, writer in flood:
                if not writer.is_closing():
                    writer.write(b"x")
        assert {await answer(reader) for reader, _ in flood} == {b""}

    against(Limits(header_seconds=0.5), attack)


@pytest.mark.parametrize(
    ("sent", "limits", "message"),
    [
        (HEAD + b"x: " + b"y" * 10**6, Limits(), b"HTTP/1.1 400"),
        (HEAD + b"content-length: 2000\r\n\r\n" + b"x" * 2000, Limits(body_bytes=1000), b"HTTP/1.1 413"),
        (HEAD + b"content-length: 2000\r\n\r\nx", Limits(body_seconds=0.2), b""),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nx", Limits(body_seconds=0.2), b""),
    ],
    ids=["a large header", "a large body", "a body that stops", "a chunk that stops"],
)
def test_too_much_and_too_slow_is_refused(sent: bytes, limits: Limits, message: bytes) -> None:
    async def attack(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(sent)
        assert (await answer(reader)).startswith(message) if message else await answer(reader) == b""

    against(limits, attack)


def test_bodies_that_stop_do_not_keep_others_from_the_superlink() -> None:
    """A pool of connections to the SuperLink, 100 in httpx, would be used up by them."""

    async def attack(connect: Connect) -> None:
        for _ in range(150):
            _, writer = await connect("127.0.0.2")
            writer.write(HEAD + b"content-length: 9\r\n\r\nx")
        assert await served(connect)

    against(Limits(connections=200), attack)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder, ["a"], ["127.0.0.1"])
    return folder


def test_connections_without_a_handshake_count_and_are_cut(keys: Path) -> None:
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(keys / "superlink.crt", keys / "superlink.key")
    trusted = ssl.create_default_context(cafile=str(keys / "ca.crt"))

    async def attack(connect: Connect) -> None:
        silent = [await connect("127.0.0.2") for _ in range(12)]
        assert [await answer(reader) for reader, _ in silent[8:]] == [b""] * 4
        _, writer = await connect()
        port = writer.get_extra_info("peername")[1]
        async with httpx.AsyncClient(verify=trusted, trust_env=False) as node:
            reply = await node.post(f"https://127.0.0.1:{port}/v1/fleet/pull-messages", content=b"body")
        assert (reply.status_code, reply.content) == (200, b"body")
        assert [await answer(reader) for reader, _ in silent[:8]] == [b""] * 8
        await asyncio.sleep(0.1)  # the proxy forgets a connection an instant after it has cut it
        again = [await connect("127.0.0.2") for _ in range(8)]
        await asyncio.sleep(0.1)
        assert not any(reader.at_eof() for reader, _ in again), "they count no more"
        assert await answer((await connect("127.0.0.2"))[0], 0.2) == b"", "and were not taken off twice"

    against(Limits(connections=8, header_seconds=0.5), attack, own)


def test_a_request_that_comes_with_the_end_of_the_handshake_is_not_lost() -> None:
    """asyncio hands on what comes after a handshake before the one who waits for the handshake goes on."""

    async def start_run() -> list[bytes]:
        written: list[bytes] = []

        class Transport(asyncio.Transport):
            def write(self, data: bytes) -> None:  # type: ignore[override]
                written.append(data)

            def is_closing(self) -> bool:
                return False

            def get_extra_info(self, name: str, default: object = None) -> object:
                return ("127.0.0.1", 1) if name == "peername" else None

        app = PathProxy("x:1", httpx.AsyncClient(transport=httpx.MockTransport(echo)))
        config = uvicorn.Config(app, http=_HTTP, log_config=None, lifespan="off", ws="none")
        config.load()
        protocol = _HTTP(config, ServerState(), {})
        protocol.data_received(WHOLE)
        protocol.connection_made(Transport())
        for _ in range(100):
            await asyncio.sleep(0)
        return written

    assert b"".join(asyncio.run(start_run())).startswith(b"HTTP/1.1 200")


def test_certificates_that_end_soon_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for days in (0, 29, 31):
        make_keys(tmp_path / str(days), ["a"], ["127.0.0.1"], days=days)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger=keys_module.__name__):
            warn_before_expiry(tmp_path / str(days) / "superlink.crt")
        message = [record.getMessage() for record in caplog.records]
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        assert len(message) == (days < 30)
        assert all(f"{end:%Y-%m}" in line and ("ended" if days == 0 else "28 days") in line for line in message)


class SuperLink(BaseHTTPRequestHandler):
    """Answers a body with itself."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def unused_ports() -> tuple[int, int]:
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [node_config.getsockname()[1] for node_config in found]
    for node_config in found:
        node_config.close()
    return ports[0], ports[1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_does_the_same_with_the_configuration_that_is_written(
    keys: Path, tmp_path: Path, unused_ports: tuple[int, int]
) -> None:
    port, behind = unused_ports
    file = tmp_path / "nginx.conf"
    words = ("--listen", f"127.0.0.1:{port}", "--superlink", f"127.0.0.1:{behind}", "--connections", "8")
    assert main(["flower", "nginx", str(file), "--keys", str(keys), *words]) == 0
    superlink = ThreadingHTTPServer(("127.0.0.1", behind), SuperLink)
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(keys / "superlink.crt", keys / "superlink.key")
    superlink.socket = own.wrap_socket(superlink.socket, server_side=True)
    threading.Thread(target=superlink.serve_forever, daemon=True).start()
    trusted = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    nginx = subprocess.Popen(["nginx", "-c", str(file), "-g", "daemon off;"], stderr=subprocess.PIPE)
    try:
        with httpx.Client(verify=trusted, trust_env=False, base_url=f"https://127.0.0.1:{port}") as node:
            for _ in range(50):
                time.sleep(0.1)
                try:
                    reply = node.post("/v1/fleet/pull-messages", content=b"\0\1body")
                    break
                except httpx.ConnectError:
                    continue
            assert (reply.status_code, reply.content) == (200, b"\0\1body")
            for path in ("/v1/control/start-run", "/health", "/v1/fleet/", "/v1/fleet/pull-messages?x=/v1/control"):
                assert node.post(path).status_code == 403, path
            assert node.post("/v1/fleet/push-object", content=b"x" * 33_000_000).status_code == 413
            assert node.post("/v1/fleet/push-object", headers={"x": "y" * 20_000}).status_code == 400
            asyncio.run(_flood(port, trusted))
            assert node.post("/v1/fleet/pull-messages", content=b"after").content == b"after"
    finally:
        nginx.terminate()
        nginx.wait()
        superlink.shutdown()
        superlink.server_close()


async def _flood(port: int, trusted: ssl.SSLContext) -> None:
    """Open 1,000 half-open requests, and ask as an honest node meanwhile."""
    raw = [await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(1000)]
    bodies = []
    for _ in range(12):
        pair = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0), ssl=trusted)
        pair[1].write(HEAD + b"content-length: 9\r\n\r\nx")
        bodies.append(pair)
    async with httpx.AsyncClient(verify=trusted, trust_env=False) as node:
        reply = await node.post(f"https://127.0.0.1:{port}/v1/fleet/pull-messages", content=b"honest")
    assert reply.content == b"honest"
    assert {await answer(reader, 15) for reader, _ in raw} == {b""}, "the header's time-out is 10 s"
    message = [await answer(reader, 0.2) for reader, _ in bodies]
    assert message.count(b"waits") == 8, "one address has eight requests at once"
    for _, writer in [*raw, *bodies]:
        writer.close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_takes_the_configuration_with_client_certificates(keys: Path, tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(nginx_configuration(file, "127.0.0.1:8000", "127.0.0.1:8001", keys, keys / "ca.crt"))
    assert "ssl_verify_client on;" in file.read_text()
    done = subprocess.run(["nginx", "-t", "-c", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_path_that_nginx_would_misread_is_refused(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nginx would not take"):
        nginx_configuration(tmp_path / "a b; c" / "nginx.conf", "127.0.0.1:8000", "127.0.0.1:8001", keys)
