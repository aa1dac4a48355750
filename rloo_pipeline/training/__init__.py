"""Training with DeepSpeed: loading models, packing, log-probs, losses, the engine."""
