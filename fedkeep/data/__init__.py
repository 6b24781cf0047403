"""Data sets, partitions over clients, task streams and augmentation."""

from __future__ import annotations

from fedkeep.data.augmentation import Augmentation
from fedkeep.data.catalog import CatalogEntry, known_datasets
from fedkeep.data.dataset import Data, DataSet, ImageFormat
from fedkeep.data.federation import ClientNames, Federation
from fedkeep.data.loading import load
from fedkeep.data.task_stream import Task, Tasks, TaskStream

__all__ = [
    "Augmentation",
    "CatalogEntry",
    "ClientNames",
    "Data",
    "DataSet",
    "Federation",
    "ImageFormat",
    "Task",
    "TaskStream",
    "Tasks",
    "known_datasets",
    "load",
]
