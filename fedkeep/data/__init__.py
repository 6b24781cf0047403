"""Data sets, partitions over clients, task streams and augmentation."""

from fedkeep.data.arrays import from_arrays
from fedkeep.data.augmentation import Augmentation
from fedkeep.data.dataset import Data, DataSet, ImageFormat
from fedkeep.data.federation import Federation
from fedkeep.data.loading import load
from fedkeep.data.schema import DataOptions
from fedkeep.data.task_stream import Tasks, TaskStream

__all__ = [
    "Augmentation",
    "Data",
    "DataOptions",
    "DataSet",
    "Federation",
    "ImageFormat",
    "TaskStream",
    "Tasks",
    "from_arrays",
    "load",
]
