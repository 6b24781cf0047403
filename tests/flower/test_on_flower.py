"""Through Flower itself: its records, its simulation, and a SuperLink with SuperNodes that have keys."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from toys import toy_recipe

import fedkeep
from fedkeep.cli import main
from fedkeep.errors import ConfigError, RunError, ValueRefused
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.flower.transport import Envelope

pytest.importorskip("flwr")

import federation as hosts
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import Metadata as MetadataProto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from fedkeep.flower import apps as records_module
from fedkeep.flower.apps import FlowerTransport, pack, unpack
from fedkeep.flower.apps import client as client_app
from fedkeep.flower.apps import server as server_app
from fedkeep.flower.keys import make_keys
from fedkeep.rounds.messages import Fault

QUICK = ["fedavg", "sfedkd"]
OTHERS = ["fedcad", "fedadkd", "scaffold"]
OVER_TASKS = ["fedlwf", "fedskf"]
APART = ["feddcl", "ft-kd"]  # over tasks too, and each site has a network of its own
SUMMED = ["fedavg"]  # with secure aggregation
SITES = 2


def parcel() -> Envelope:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3).T,
        "b": torch.tensor(3),
        "c": torch.zeros(0, 4),
        "d": torch.tensor([True, False]),
    }
    return Envelope({"x": [1, 2.5, "text", None]}, tensors)


def test_a_parcel_arrives_as_it_was_sent() -> None:
    sent = parcel()
    arrived = unpack(pack(sent), 1e6)
    assert arrived.head == sent.head
    assert tiny.equal(arrived.tensors, sent.tensors)
    assert all(arrived.tensors[name].shape == tensor.shape for name, tensor in sent.tensors.items())


def test_what_is_too_large_is_refused_unread() -> None:
    with pytest.raises(ValueRefused, match=r"0\.0 MB, where at most 0\.0 MB are taken"):
        unpack(pack(parcel()), 100)


class PretendedSuperLink:
    """Holds replies, and counts the bytes that are read of them. It has no object after the first ``available``.

    A reply is a message, or an object that a site may have made instead of one, with the objects that it names.
    """

    def __init__(self, *replies: Message | bytes, available: int = 10**9, seconds: float = 0.0) -> None:
        self.objects: dict[str, bytes] = {}
        self.trees: dict[str, ObjectTree] = {}
        for asked, reply in zip("mno", replies, strict=False):
            if isinstance(reply, bytes):
                self.objects[get_object_id(reply)] = reply
                self.trees[asked] = ObjectTree(object_id=get_object_id(reply))
            else:
                self.objects |= {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
                self.trees[asked] = get_object_tree(reply)
        self.available = available
        self.seconds = seconds
        self.read = 0

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:
        told = {asked: self.trees.pop(asked) for asked in request.message_ids if asked in self.trees}
        return PullAppMessagesResponse(
            messages_list=[
                MessageProto(metadata=MetadataProto(message_id=tree.object_id, reply_to_message_id=asked))
                for asked, tree in told.items()
            ],
            message_object_trees=[*told.values()],
        )

    def PullObject(self, request: Any) -> PullObjectResponse:
        if self.available <= 0:
            return PullObjectResponse(object_found=True, object_available=False)
        self.available -= 1
        time.sleep(self.seconds)
        content = self.objects[request.object_id]
        self.read += len(content)
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        pass


def connect(superlink: PretendedSuperLink, max_size: float = 1e6, seconds: float = math.inf) -> FlowerTransport:
    grid = HttpGrid(token="t")
    grid.set_run(Run.create_empty(1))
    grid._client = superlink  # type: ignore[assignment]
    return FlowerTransport(grid, max_size, seconds)


def receive(superlink: PretendedSuperLink, max_size: float) -> Envelope | Fault:
    (reply,) = connect(superlink, max_size).receive(["m"]).values()
    return reply


def answered(*tensors: torch.Tensor, asked: str = "m") -> Message:
    content = pack(Envelope({"answer": 1}, {str(number): tensor for number, tensor in enumerate(tensors)}))
    return make_message(Metadata(1, "", 1, 0, asked, "", time.time(), 60.0, "train.perform"), content)


def made(kind: str, children: str, body: bytes) -> bytes:
    return f"{kind} {children} {len(body)}".encode() + b"\0" + body


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (made("Message", "", b"\xff\xff\xff"), "a message that FedKeep did not write: DecodeError"),
        (made("NoSuchClass", "", b"x"), "a message that FedKeep did not write: KeyError"),
        (made("ConfigRecord", "", b""), "a message that FedKeep did not write"),
        (made("Message", "0" * 64, b""), "a message that FedKeep did not write: KeyError"),
    ],
)
def test_what_flower_cannot_build_loses_its_own_site_alone(reply: bytes, said: str) -> None:
    transport, replies = connect(PretendedSuperLink(reply, answered(torch.rand(4), asked="n"))), {}
    while new := transport.receive([asked for asked in "mn" if asked not in replies]):
        replies |= new
    assert isinstance(replies["m"], Fault)
    assert said in replies["m"].text
    assert isinstance(replies["n"], Envelope)


def test_a_site_cannot_answer_in_the_name_of_another() -> None:
    transport = connect(PretendedSuperLink(answered(torch.rand(4), asked="n")))
    assert list(transport.receive(["m", "n"])) == ["m"], "a SuperLink knows which message was answered"
    assert transport.receive(["n"]) == {}


def test_a_reply_of_many_small_objects_does_not_keep_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "UPLOAD_SECONDS", 0.05)
    reply = receive(PretendedSuperLink(answered(*(torch.rand(1) for _ in range(99))), seconds=0.02), 2e6)
    assert isinstance(reply, Fault)
    assert "was not whole" in reply.text


def test_a_trickling_reply_is_given_up_at_the_deadline_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "UPLOAD_SECONDS", 0.05)
    monkeypatch.setattr(records_module, "SLOWEST", 1e-3)
    superlink = PretendedSuperLink(answered(*(torch.rand(1) for _ in range(99))), seconds=0.02)
    (reply,) = connect(superlink, 2e6, seconds=0.1).receive(["m"]).values()
    assert isinstance(reply, Fault)
    assert "was not whole" in reply.text


def test_a_superlink_that_fails_is_no_fault_of_the_site_that_answered_last(monkeypatch: pytest.MonkeyPatch) -> None:
    superlink = PretendedSuperLink(answered(torch.rand(4)))
    transport = connect(superlink)
    assert isinstance(transport.receive(["m"])["m"], Envelope)

    def fail(request: Any) -> Any:
        raise OSError("the database is locked")

    monkeypatch.setattr(superlink, "PullMessages", fail)
    with pytest.raises(OSError, match="the database is locked"):
        transport.receive(["n"])


def test_a_reply_that_is_too_large_is_not_read_to_its_end() -> None:
    superlink = PretendedSuperLink(answered(*(torch.rand(500_000) for _ in range(20))))  # 40 MB
    reply = receive(superlink, 2e6)
    assert isinstance(reply, Fault)
    assert "more than 2.0 MB" in reply.text
    assert superlink.read < 12e6
    superlink = PretendedSuperLink(answered(torch.rand(400_000)))
    whole = receive(superlink, 2e6)
    assert isinstance(whole, Envelope)
    assert whole.tensors["0"].shape == (400_000,)


def test_a_reply_that_never_becomes_whole_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "UPLOAD_SECONDS", 0.0)
    reply = receive(PretendedSuperLink(answered(torch.rand(4)), available=1), 2e6)
    assert isinstance(reply, Fault)
    assert "was not whole" in reply.text


def test_a_head_that_is_too_large_is_refused_unread() -> None:
    assert unpack(pack(Envelope({"x": "y" * 1000})), 1e6, 2000).head
    with pytest.raises(ValueRefused, match=r"a head of 0\.0 MB, where at most 0\.0 MB are taken"):
        unpack(pack(Envelope({"x": "y" * 2000})), 1e6, 2000)
    with pytest.raises(ValueRefused, match="a head of"):
        unpack(pack(Envelope({}, {"name" * 600: torch.zeros(1)})), 1e6, 2000)


@pytest.mark.parametrize(
    "records",
    [
        RecordDict(),
        RecordDict({"head": ConfigRecord({"text": "[1"}), "tensors": ArrayRecord()}),
        RecordDict({"head": ConfigRecord({"text": "[1]"}), "tensors": ArrayRecord()}),
        RecordDict({"head": ConfigRecord({"other": "{}"}), "tensors": ArrayRecord()}),
        RecordDict({"head": ConfigRecord({"text": [1, 2]}), "tensors": ArrayRecord()}),
        RecordDict({"head": ConfigRecord({"text": '{"x":' * 100_000}), "tensors": ArrayRecord()}),
        RecordDict(
            {
                "head": ConfigRecord({"text": "{}"}),
                "tensors": ArrayRecord({"x": Array("float32", (2,), "numpy.ndarray", b"no array")}),
            }
        ),
        RecordDict(
            {
                "head": ConfigRecord({"text": "{}"}),
                "tensors": ArrayRecord({"x": Array("float32", (2,), "other", b"")}),
            }
        ),
    ],
)
def test_what_fedkeep_did_not_write_is_refused(records: RecordDict) -> None:
    with pytest.raises(ValueRefused, match="a message that FedKeep did not write"):
        unpack(records, 1e6)


def test_types_that_numpy_lacks_are_refused_with_a_reason() -> None:
    with pytest.raises(ValueRefused, match="NumPy"):
        pack(Envelope({}, {"x": torch.zeros(2, dtype=torch.bfloat16)}))


def test_keys_are_of_the_kind_that_flower_reads_and_never_overwritten(tmp_path: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    written = make_keys(tmp_path / "keys", ["a", "b"], ["localhost", "10.0.0.1"])
    assert {path.name for path in written} == {
        *("ca.crt", "superlink.crt", "superlink.key"),
        *("a.key", "a.pub", "b.key", "b.pub"),
    }
    private = load_ssh_private_key((tmp_path / "keys" / "a.key").read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "keys" / "a.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.public_key() == public
    assert all((path.stat().st_mode & 0o777) == 0o600 for path in written if path.suffix == ".key")
    ca, link = (
        x509.load_pem_x509_certificate((tmp_path / "keys" / f"{n}.crt").read_bytes()) for n in ("ca", "superlink")
    )
    link.verify_directly_issued_by(ca)
    with pytest.raises(RunError, match="never overwritten"):
        make_keys(tmp_path / "keys", ["a"], ["localhost"])
    with pytest.raises(ConfigError, match="different names"):
        make_keys(tmp_path / "others", ["../a"], ["localhost"])


@pytest.mark.parametrize(
    "host",
    [
        "fl.example.org:8000",
        "https://x.org",
        "x.org/",
        "fl.ex\u00e4mple.org",
        "192.0.2.300",
        "[::1]",
        "a..b",
        "x.org.",
        "\u212aiel.org",  # a sign that looks like a K
        "",
    ],
)
def test_hosts_that_no_site_could_reach_are_refused_before_anything_is_written(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no host name and no IP address"):
        make_keys(tmp_path / "keys", ["a"], ["fl.example.org", host])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("site", ["superlink", "SuperLink", "\u9662" * 90, "a\0", "", "a/b"])
def test_sites_whose_keys_could_not_be_written_are_refused_before_anything_is(site: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can be file names|no site can be called"):
        make_keys(tmp_path / "keys", ["a", site], ["localhost"])
    assert not (tmp_path / "keys").exists()


def test_a_certificate_names_all_hosts(tmp_path: Path) -> None:
    from cryptography import x509

    names = ["fl.example.org", "*.example.org", "fl_server", "xn--exmple-cua.org", "3d.example"]
    make_keys(tmp_path / "keys", ["\u043c\u043e\u0441\u043a\u0432\u0430"], [*names, "192.0.2.1", "::1"])
    cert = x509.load_pem_x509_certificate((tmp_path / "keys" / "superlink.crt").read_bytes())
    found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.DNSName) == ["localhost", *names]
    assert [str(address) for address in found.get_values_for_type(x509.IPAddress)] == ["192.0.2.1", "::1"]


def new_app(folder: Path, methods: list[str]) -> Path:
    if methods == APART:
        recipe = toy_recipe(folder / "toy", ("ft-kd",), '[public]\nname = "digits"\nnum_images = 20\n')
        assert main(["flower", "new", str(folder / "app"), "--recipe", recipe]) == 0
        return folder / "app"
    rounds, changes = "3", ["partition.classes_per_client=6", "training.epochs=1"]
    if methods == OVER_TASKS:  # five classes arrive with each
        rounds, changes = (
            "2",
            ["partition.classes_per_client=3", "training.epochs=1", "tasks.num_tasks=2", "fedskf.level=icarl"],
        )
    changes += ["privacy.secure_aggregation=true"] if methods == SUMMED else []
    changes += ["auxiliary.images_per_class=2"] if "fedcad" in methods else []
    words = ["--sites", str(SITES), "--seeds", "0", "--rounds", rounds, "--methods", ",".join(methods)]
    sets = [word for change in changes for word in ("--set", change)]
    assert main(["flower", "new", str(folder / "app"), *words, *sets]) == 0
    return folder / "app"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def compare(app: Path, out: Path, reported: str, atol: float = 1e-6) -> None:
    """Check that a run on Flower has the models of the embedded simulation."""
    assert (out / "report.html").is_file(), reported
    run = fedkeep.run(load_recipe(str(app / "recipe.toml")), out=out.parent / "embedded")
    assert run.trials
    for trial in run.trials:
        mine, theirs = (
            load_file(folder / "model.safetensors") for folder in (trial.path, out / "trials" / trial.path.name)
        )
        assert mine.keys() == theirs.keys()
        assert all(torch.allclose(mine[name], theirs[name], rtol=0, atol=atol) for name in mine)


def sites_of(methods: list[str]) -> int:
    return 3 if methods == APART else SITES


class InProcessGrid:
    """Flower's Grid for sites in this process: a message is answered by the ClientApp when it is pushed."""

    def __init__(self, run_config: dict[str, Any], sites: int) -> None:
        self.contexts = {
            site: Context(1, site, {"partition-id": site, "num-partitions": sites}, RecordDict(), run_config)
            for site in range(sites)
        }
        self.replies: dict[str, Message] = {}

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=node, name="") for node in self.contexts]

    def push_messages(self, messages: list[Message]) -> list[str]:
        for number, message in enumerate(messages, start=len(self.replies)):
            message.metadata.__dict__["_message_id"] = str(number)
            self.replies[str(number)] = client_app(message, self.contexts[message.metadata.dst_node_id])
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: list[str]) -> list[Message]:
        return [self.replies[message_id] for message_id in message_ids]


@pytest.mark.parametrize("methods", [["sfedkd"], SUMMED], ids=",".join)
def test_both_apps_give_the_same_models(methods: list[str], tmp_path: Path) -> None:
    """What Flower calls, with its messages and contexts; the slow tests run it in Flower's simulation."""
    app, out = new_app(tmp_path, methods), tmp_path / "out"
    config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 0  # as Flower does in a process of its own
    config |= {"recipe": str(app / "recipe.toml"), "out": str(out), "state-dir": str(tmp_path / "sites")}
    server_app(InProcessGrid(config, SITES), Context(1, 0, {}, RecordDict(), config))  # type: ignore[arg-type]
    compare(app, out, "", atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("methods", [QUICK, OTHERS, OVER_TASKS, APART, SUMMED], ids=",".join)
def test_the_simulation_gives_the_same_models(methods: list[str], tmp_path: Path) -> None:
    app, out = new_app(tmp_path, methods), tmp_path / "out"
    compare(app, out, hosts.simulate(tmp_path, app, sites_of(methods), f'out="{out}"', free_port()))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
@pytest.mark.parametrize("methods", [QUICK + OTHERS, OVER_TASKS, APART, SUMMED], ids=",".join)
def test_a_superlink_with_supernodes_gives_the_same_models(methods: list[str], tmp_path: Path) -> None:
    app, out = new_app(tmp_path, methods), tmp_path / "out"
    names = [str(number) for number in range(sites_of(methods))]
    with hosts.federation(tmp_path, names, port=free_port()) as result:
        result.make_keys(names)
        result.start_superlink()
        result.start_proxy()
        for name in names:
            result.register(name)
            result.start_supernode(name, f"partition-id={name} num-partitions={len(names)}")
        result.start_run(app, f'out="{out}"').wait(timeout=1500)
        reported = result.link.log("run.log")
    compare(app, out, reported)


def test_flower_is_not_imported_unless_used_and_without_it_a_command_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'flwr' else find(name, *rest)\n"
        "import fedkeep.cli.main, fedkeep.flower.server, fedkeep.flower.client_handler\n"
        "assert 'flwr' not in sys.modules\n"
        "from fedkeep.cli import main; sys.exit(main(['flower', 'new', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "pip install 'flwr[simulation]" in done.stderr.strip().splitlines()[-1], "the command is on one line"
    assert "Traceback" not in done.stderr


def test_a_new_app_is_whole_and_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = new_app(tmp_path, QUICK)
    assert {path.name for path in app.iterdir()} == {"pyproject.toml", "recipe.toml", "fedkeep_app.py"}
    recipe = load_recipe(str(app / "recipe.toml"))
    assert (recipe.partition.num_clients, recipe.run.cohort_size, recipe.run.rounds) == (SITES, SITES, 3)
    assert main(["flower", "new", str(app)]) == 1
    assert "not empty" in capsys.readouterr().err
