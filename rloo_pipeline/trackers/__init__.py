"""Sends a round's metrics to TensorBoard, Weights & Biases and MLflow."""
