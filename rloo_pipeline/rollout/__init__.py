"""Sampling with vLLM: prompt ids and seeds in, completions with log-probs out."""
