"""Taking a trained model away: files for PyTorch and ONNX, a model card, and predictions for new inputs."""
