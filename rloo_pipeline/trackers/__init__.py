"""A round's metrics for TensorBoard, Weights & Biases and MLflow."""
