"""Data sets, partitions over clients, task streams and augmentation."""

from fedkeep.data.arrays import from_arrays
from fedkeep.data.augmentation import Augmentation
from fedkeep.data.catalog import CatalogEntry, known_datasets
from fedkeep.data.dataset import Data, DataSet, ImageFormat
from fedkeep.data.federation import ClientNames, Federation
from fedkeep.data.loading import load
from fedkeep.data.schema import DataOptions
from fedkeep.data.task_stream import Task, Tasks, TaskStream

__all__ = [
    "Augmentation",
    "CatalogEntry",
    "ClientNames",
    "Data",
    "DataOptions",
    "DataSet",
    "Federation",
    "ImageFormat",
    "Task",
    "TaskStream",
    "Tasks",
    "from_arrays",
    "known_datasets",
    "load",
]
