"""A bare PyTorch loop, what one would write by hand: ``bare.py WORK THREADS parallel|sequential``.

With one thread it also keeps its weights of the first rounds beside the work, which the others' are compared with.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from networks import build, by_name
from torch import Tensor, nn
from turns import Turns
from work import Work

KEPT = 10


def main() -> None:
    """Play rounds when asked."""
    work = Work(sys.argv[1])
    torch.set_num_threads(int(sys.argv[2]))
    play = sequential if sys.argv[3] == "sequential" else parallel
    network, number = build(work), 0
    turns = Turns(lambda: (by_name(network, work), number))
    images, labels = (torch.from_numpy(np.array(column)) for column in (work.images, work.labels))
    going = turns.begin("torch")
    while going:
        number += 1
        play(work, network, images, labels, number)
        going = turns.done()
        if torch.get_num_threads() == 1 and number <= KEPT:
            np.savez(work.folder / f"bare-{number}.npz", **by_name(network, work))  # after its turn


def parallel(work: Work, network: nn.Module, images: Tensor, labels: Tensor, number: int) -> None:
    """Play a round of FedAvg, clients one after another."""
    parameters = list(network.parameters())
    server = [parameter.detach().clone() for parameter in parameters]
    total = [torch.zeros_like(weight) for weight in server]
    orders = [torch.from_numpy(np.array(work.rows(number, place))) for place in range(work.cohort)]
    examples = sum(order.shape[1] for order in orders)
    for order in orders:
        with torch.no_grad():
            for parameter, weight in zip(parameters, server, strict=True):
                parameter.copy_(weight)
        train(work, network, images, labels, order)
        for summed, parameter in zip(total, parameters, strict=True):
            summed.add_(parameter.detach(), alpha=order.shape[1] / examples)
    with torch.no_grad():
        for parameter, mean in zip(parameters, total, strict=True):
            parameter.copy_(mean)


def sequential(work: Work, network: nn.Module, images: Tensor, labels: Tensor, number: int) -> None:
    """Play a round of FedSeq: each client goes on where the one before left."""
    for place in range(work.cohort):
        train(work, network, images, labels, torch.from_numpy(np.array(work.rows(number, place))))


def train(work: Work, network: nn.Module, images: Tensor, labels: Tensor, order: Tensor) -> None:
    """Train on one client's rows, int64 [epochs, examples]."""
    loss_of = nn.CrossEntropyLoss()
    optimiser = torch.optim.SGD(network.parameters(), work.lr, momentum=work.momentum, weight_decay=work.weight_decay)
    for epoch in order:
        for batch in epoch.split(work.batch_size):
            optimiser.zero_grad()
            loss_of(network(images[batch]), labels[batch]).backward()
            optimiser.step()


if __name__ == "__main__":
    main()
