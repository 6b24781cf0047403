"""Diffusion: a frozen generator draws images of classes that prototypes describe."""
