"""Values between processes."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from fedkeep.executors import workers


@pytest.mark.parametrize("piece", [workers.PIECE, 5])
def test_what_is_sent_is_received(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PIECE", piece)
    near, far = multiprocessing.Pipe()
    tensors = {
        "matrix": torch.arange(6.0).view(2, 3).t(),  # not contiguous
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "count": torch.tensor(7),
        "none": torch.empty(0, 3),
    }
    workers.send_message(near, ["text", {"a": [1, None, 2.5]}], tensors)
    structure, received = workers.receive_message(far)
    assert structure == ["text", {"a": [1, None, 2.5]}]
    assert received.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


def test_a_connection_that_ends_in_the_middle_is_an_error() -> None:
    near, far = multiprocessing.Pipe()
    near.send_bytes(b'["half a message",[["x","float32",[2]]]]')
    near.close()
    with pytest.raises(EOFError):
        workers.receive_message(far)
