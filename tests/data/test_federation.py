"""A federation is a view: cheap to make, exact in what it gives."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
import torch

from fedkeep.data.dataset import DataSet
from fedkeep.data.federation import ClientNames, Federation
from fedkeep.errors import DataError


class Parts:
    """What a federation uses of a partition."""

    def __init__(self, rows: torch.Tensor, offsets: torch.Tensor) -> None:
        self.rows, self.offsets = rows, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def size(self, client: int) -> int:
        return len(self[client])

    def __getitem__(self, client: int) -> torch.Tensor:
        return self.rows[int(self.offsets[client]) : int(self.offsets[client + 1])]


def federation(rows: torch.Tensor, offsets: torch.Tensor, examples: int) -> Federation:
    labels = torch.arange(examples) % 2
    images = (torch.arange(examples) % 251).to(torch.uint8).view(-1, 1, 1, 1)
    train = {"input": images, "label": labels, "writer": torch.arange(examples)}
    test = {name: column[:2] for name, column in train.items()}
    dataset = DataSet("small", train, test, ("even", "odd"), (0.5,), (0.5,))
    return Federation(dataset, cast("Any", Parts(rows, offsets)))


def test_client_rows_of_every_column() -> None:
    result = federation(torch.tensor([5, 2, 7, 0, 1]), torch.tensor([0, 3, 3, 5]), 8)
    assert list(result.clients) == ["0", "1", "2"]
    data = result.data("0")
    assert set(data) == {"input", "label", "writer"}
    assert data["writer"].tolist() == [5, 2, 7]
    assert data["label"].tolist() == [1, 0, 1]
    assert data["input"].flatten().tolist() == [5, 2, 7]
    assert [result.num_examples(client) for client in result.clients] == [3, 0, 2]
    assert len(result.data("1")["label"]) == 0
    assert result.to("cpu") is result


@pytest.mark.parametrize("name", ["3", "-1", "00", "1.0", "", " 1", "a", "٢", "9" * 30])
def test_unknown_client(name: str) -> None:
    result = federation(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2, 3]), 4)
    assert name not in result.clients
    with pytest.raises(DataError, match="'0' to '2'"):
        result.data(name)


def test_partition_of_another_data_set() -> None:
    with pytest.raises(DataError, match="has 4 training rows"):
        federation(torch.tensor([0, 4]), torch.tensor([0, 2]), 4)


def test_names_are_a_sequence() -> None:
    names = ClientNames(12)
    assert names[11] == "11"
    assert names[-1] == "11"
    assert names[2:5] == ("2", "3", "4")
    assert names.index("7") == 7
    assert "12" not in names
    assert 3 not in names  # type: ignore[comparison-overlap]
    assert len(list(names)) == 12
    assert names == ClientNames(12)
    with pytest.raises(IndexError):
        names[12]
    with pytest.raises(ValueError, match="'x'"):
        names.index("x")


def test_a_million_clients_start_at_once() -> None:
    count = 1_000_000
    result = federation(torch.arange(count).flip(0), torch.arange(count + 1), count)
    started = time.perf_counter()
    again = Federation(result.dataset, result.partition)
    assert len(again.clients) == count
    assert again.data("999999")["writer"].tolist() == [0]
    assert again.num_examples("123456") == 1
    assert again.clients.index("654321") == 654321
    assert time.perf_counter() - started < 0.2
