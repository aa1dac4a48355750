"""Training with DeepSpeed: models and policies on disk, packed log-probs, the engine, ranks."""
