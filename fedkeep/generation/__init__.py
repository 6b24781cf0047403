"""Generated images of classes whose examples nobody kept: from a diffusion model, or by inverting a classifier."""
