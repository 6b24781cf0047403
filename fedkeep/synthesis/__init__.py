"""Examples without data: images that a server makes from what a model has learned."""

from fedkeep.synthesis.anchors import read_anchors
from fedkeep.synthesis.inversion import Inversion, Inverter, Problem
from fedkeep.synthesis.latent import LatentInverter
from fedkeep.synthesis.text import TextInverter

__all__ = ["Inversion", "Inverter", "LatentInverter", "Problem", "TextInverter", "read_anchors"]
