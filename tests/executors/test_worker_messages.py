"""Values between processes."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest
import torch

from fedkeep.executors import workers


def test_what_is_sent_is_received() -> None:
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


def test_tensors_that_are_larger_than_the_pipe_arrive_whole() -> None:
    near, far = multiprocessing.Pipe()
    tensors = {str(size): torch.arange(size, dtype=torch.int32) for size in (1, 3_000_001, 5, 700_000)}
    sender = threading.Thread(target=workers.send_message, args=(near, "numbers", tensors))
    sender.start()
    structure, received = workers.receive_message(far)
    sender.join()
    assert structure == "numbers"
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("sent", [b"", b"1234"])
def test_a_connection_that_ends_in_the_middle_is_an_error(sent: bytes) -> None:
    near, far = multiprocessing.Pipe()
    near.send_bytes(b'["half a message",[["x","float32",[2]]]]')
    os.write(near.fileno(), sent)
    near.close()
    with pytest.raises(EOFError):
        workers.receive_message(far)
