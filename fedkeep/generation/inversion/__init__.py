"""Model inversion: images that a server generates from what a classifier has learned."""

from fedkeep.generation.inversion.anchors import read_anchors
from fedkeep.generation.inversion.base import InversionConfig, InversionProblem, Inverter
from fedkeep.generation.inversion.latent_inverter import LatentInverter
from fedkeep.generation.inversion.text_inverter import TextInverter

__all__ = ["InversionConfig", "InversionProblem", "Inverter", "LatentInverter", "TextInverter", "read_anchors"]
