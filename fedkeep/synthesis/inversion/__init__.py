"""Model inversion: images that a server makes from what a model has learned."""

from fedkeep.synthesis.inversion.anchors import read_anchors
from fedkeep.synthesis.inversion.inverter import Inversion, Inverter, Problem
from fedkeep.synthesis.inversion.latent import LatentInverter
from fedkeep.synthesis.inversion.text import TextInverter

__all__ = ["Inversion", "Inverter", "LatentInverter", "Problem", "TextInverter", "read_anchors"]
