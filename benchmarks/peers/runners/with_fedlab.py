"""FedLab's standalone simulation: ``with_fedlab.py WORK``."""

# ruff: noqa: E402

from __future__ import annotations

import sys
from unittest.mock import MagicMock

sys.modules["torchvision"] = MagicMock()  # FedLab imports it for data sets that are not used here

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from networks import build, by_name
from torch.utils.data import DataLoader, TensorDataset
from turns import Turns
from work import Work


class Clients:
    """The data set as a trainer asks for it, one loader a client."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.number = 0

    def get_dataloader(self, place: int, batch_size: int) -> DataLoader:
        """Return the examples of a client of this round's cohort, in the order of the work."""
        images, labels = map(torch.from_numpy, self.work.one_epoch(self.number, place))
        return DataLoader(TensorDataset(images, labels), batch_size)


class InTurns(StandalonePipeline):
    """FedLab's pipeline, which waits for its turn between rounds."""

    def __init__(self, handler: SyncServerHandler, trainer: SGDSerialClientTrainer, clients: Clients) -> None:
        super().__init__(handler, trainer)
        self.clients = clients

    def main(self) -> None:
        """Play rounds when asked."""
        work = self.clients.work
        turns = Turns(lambda: (by_name(self.handler.model, work), self.clients.number))
        going = turns.begin("fedlab", "torch")
        while going:
            self.clients.number += 1
            self.trainer.local_process(self.handler.downlink_package, range(work.cohort))
            for package in self.trainer.uplink_package:
                self.handler.load(package)
            going = turns.done()


def main() -> None:
    """Set up and play."""
    work = Work(sys.argv[1])
    torch.set_num_threads(1)
    clients = Clients(work)
    handler = SyncServerHandler(build(work), global_round=work.rounds, sample_ratio=work.cohort / work.clients)
    trainer = SGDSerialClientTrainer(build(work), num_clients=work.clients)
    trainer.setup_dataset(clients)
    trainer.setup_optim(work.epochs, work.batch_size, work.lr)
    InTurns(handler, trainer, clients).main()


if __name__ == "__main__":
    main()
