"""Data sets, who holds which part of them, and how images are varied."""

from __future__ import annotations

from fedkeep.data.augment import Augmentation
from fedkeep.data.dataset import Data, DataSet, ImageFormat
from fedkeep.data.federation import ClientNames, Federation
from fedkeep.data.known import Known, known
from fedkeep.data.sources import load
from fedkeep.data.tasks import Task, Tasks, TaskStream

__all__ = [
    "Augmentation",
    "ClientNames",
    "Data",
    "DataSet",
    "Federation",
    "ImageFormat",
    "Known",
    "Task",
    "TaskStream",
    "Tasks",
    "known",
    "load",
]
