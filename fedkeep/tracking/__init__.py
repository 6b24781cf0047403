"""Metrics of each round for TensorBoard, Weights & Biases, MLflow, or a CSV file: only where a recipe asks for it."""
