"""Examples without data: images that a model makes of classes whose own images nobody kept."""
