"""Networks, each split into features and a classifier, and models as values: their named tensors."""

from fedkeep.models.alexnet import AlexNet8, AlexNet8USFC
from fedkeep.models.base import Architecture, Network, Shape, architecture, architectures
from fedkeep.models.cnn4 import CNN4
from fedkeep.models.cnn_ll import CNNLL
from fedkeep.models.lenet import LeNet5
from fedkeep.models.mean_cnn import MeanCNN
from fedkeep.models.mlp import MLP
from fedkeep.models.pretrained import Pretrained
from fedkeep.models.resnet import ResNet18, ResNet34, ResNet50
from fedkeep.models.resnet32 import ResNet32
from fedkeep.models.simple_cnn import SimpleCNN
from fedkeep.models.vgg import VGG16
from fedkeep.models.weights import Weights

__all__ = [
    "CNN4",
    "CNNLL",
    "MLP",
    "VGG16",
    "AlexNet8",
    "AlexNet8USFC",
    "Architecture",
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
    "architecture",
    "architectures",
]
