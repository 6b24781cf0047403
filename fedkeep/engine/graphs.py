"""Local steps as CUDA graphs: recorded once, replayed with one call each.

A step of a small network is a hundred kernels or two, and a CPU takes longer to launch them one by one than a GPU to
run them. A graph launches all at once. It reads and writes where it did when it was recorded: so weights, momenta and
the learning rate stay in place, and what differs from step to step, the batches, or from client to client, what an
objective holds, is copied to where the graph looks for it.

Steps whose tensors have the same shapes share a graph, whoever's they are. Steps that cannot be replayed, since a
method's own code watches them or computes the network's weights, are taken one kernel at a time as without graphs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkeep.engine.fit import Assignment, Learner
from fedkeep.engine.forms import filled, tensors
from fedkeep.engine.networks import Networks
from fedkeep.engine.recording import Recorder, Replay
from fedkeep.interface import Training
from fedkeep.interface.training import Watch
from fedkeep.losses import Batch, Objective

WARM = 3  # steps of a shape that are taken as they are, before one is recorded: libraries prepare themselves in them
KINDS = 50  # of training that are remembered; objectives that hold functions made anew are new kinds each time


class Graphs:
    """The recorded steps of one network in training."""

    def __init__(self, networks: Networks, recorder: Recorder) -> None:
        self.networks = networks
        self.recorder = recorder
        self._learner: GraphLearner | None = None

    def learner(self, assignment: Assignment, training: Training) -> Learner:
        """Return what takes the steps of a training of the network's own weights, which were loaded already."""
        weights = dict(self.networks.trained.named_parameters())
        known = self._learner
        # A new task may have given the network another classifier, of which no graph knows.
        same = known is not None and known.training == training and _same(known.weights, weights)
        if known is None or not same:
            known = self._learner = GraphLearner(self.networks, training, self.recorder)
        known.begin(assignment)
        return known


@dataclass
class _Shape:
    """Steps of the same batch sizes: how many were taken, and where their graph reads the batches."""

    taken: int = 0
    batches: list[Batch] = field(default_factory=list)
    replay: Replay | None = None


@dataclass
class _Kind:
    """Trainings with the same steps: how many there were, and where their graphs read what changes.

    ``held`` is what the objective holds, ``room`` a batch of every source of which shorter ones are a part.
    """

    objective: Objective
    held: list[Tensor]
    trainings: int = 0
    room: list[Batch] = field(default_factory=list)
    shapes: dict[tuple[int, ...], _Shape] = field(default_factory=dict)


class GraphLearner(Learner):
    """Takes the steps of one training after another on the same weights."""

    def __init__(self, networks: Networks, training: Training, recorder: Recorder) -> None:
        network = networks.trained
        self.rate = torch.zeros((), device=networks.device)
        super().__init__(networks, dict(network.named_parameters()), network, training, self.rate)
        self.recorder = recorder
        self._kinds: dict[Hashable, _Kind] = {}
        self._kind: _Kind

    def begin(self, assignment: Assignment) -> None:
        """Prepare for the steps of a training."""
        self.rate.fill_(self.training.lr_at(assignment.round))
        for tensor in (self.losses, *self.momenta):
            tensor.zero_()
        name, held = assignment.kind, tensors(assignment.objective)
        kind = self._kinds.get(name)
        if kind is None or not all(_fits(*each) for each in zip(kind.held, held, strict=True)):
            if kind is None and len(self._kinds) >= KINDS:
                del self._kinds[next(iter(self._kinds))]
            places = [_room(tensor, column) for tensor, column in held]
            before = 0 if kind is None else kind.trainings
            kind = self._kinds[name] = _Kind(filled(assignment.objective, places), places, before)
        for place, (tensor, column) in zip(kind.held, held, strict=True):
            (place[: len(tensor)] if column else place).copy_(tensor)
        kind.trainings += 1
        self._kind = kind

    def step(self, objective: Objective, batches: list[Batch], watch: Watch | None = None) -> None:
        kind = self._kind
        shape = kind.shapes.setdefault(tuple(len(batch.index) for batch in batches), _Shape())
        # What is trained once may never be again, and recording takes as long as many steps.
        if shape.taken < WARM or kind.trainings == 1:
            with self.recorder.apart():
                super().step(objective, batches)
            shape.taken += 1
            return
        shape.batches = shape.batches or _places(kind, batches)
        for place, batch in zip(shape.batches, batches, strict=True):
            place.index.copy_(batch.index)
            for name, column in batch.data.items():
                place.data[name].copy_(column)
        shape.replay = shape.replay or self._recorded(kind.objective, shape.batches)
        shape.replay()

    def _recorded(self, objective: Objective, batches: list[Batch]) -> Replay:
        try:
            return self.recorder.record(lambda: super(GraphLearner, self).step(objective, batches))
        except Exception as error:
            self.networks.graphs = None
            error.add_note(
                f"A step with {type(objective).__name__} was being recorded as a CUDA graph, in which nothing may ask "
                "for a number or choose by one; the first of these errors says what did. Run without --graphs."
            )
            raise


def _fits(place: Tensor, held: tuple[Tensor, bool]) -> bool:
    tensor, column = held
    return not column or len(tensor) <= len(place)


def _places(kind: _Kind, batches: Sequence[Batch]) -> list[Batch]:
    """Return where a graph reads batches of these lengths."""
    if any(len(batch.index) > len(room.index) for room, batch in zip(kind.room, batches, strict=bool(kind.room))):
        kind.room = []  # graphs of shorter ones keep what they had
    kind.room = kind.room or [
        Batch({name: torch.empty_like(column) for name, column in batch.data.items()}, torch.empty_like(batch.index))
        for batch in batches
    ]
    return [
        Batch({name: column[: len(batch.index)] for name, column in room.data.items()}, room.index[: len(batch.index)])
        for room, batch in zip(kind.room, batches, strict=True)
    ]


def _room(tensor: Tensor, column: bool) -> Tensor:
    """Return room for a tensor; for a column, for somewhat longer ones too, of which nobody reads the end."""
    if not column:
        return torch.empty_like(tensor)
    return tensor.new_zeros(1 << max(len(tensor) - 1, 0).bit_length(), *tensor.shape[1:])


def _same(these: Mapping[str, Tensor], those: Mapping[str, Tensor]) -> bool:
    return these.keys() == those.keys() and all(these[name] is those[name] for name in these)
