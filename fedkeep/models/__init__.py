"""Networks, each split into features and a classifier, and models as values: tensors by name."""

from fedkeep.models.base import Architecture, Network, Shape, architectures, get_architecture
from fedkeep.models.networks import (
    CNN4,
    CNNLL,
    MLP,
    VGG16,
    AlexNet8,
    AlexNet8USFC,
    EmbeddingBag,
    LeNet5,
    MeanCNN,
    ResNet18,
    ResNet32,
    ResNet34,
    ResNet50,
    SimpleCNN,
)
from fedkeep.models.pretrained import Pretrained
from fedkeep.models.weights import Weights

__all__ = [
    "CNN4",
    "CNNLL",
    "MLP",
    "VGG16",
    "AlexNet8",
    "AlexNet8USFC",
    "Architecture",
    "EmbeddingBag",
    "LeNet5",
    "MeanCNN",
    "Network",
    "Pretrained",
    "ResNet18",
    "ResNet32",
    "ResNet34",
    "ResNet50",
    "Shape",
    "SimpleCNN",
    "Weights",
    "architectures",
    "get_architecture",
]
