"""Attention, layers and the head, with gradients of their own."""
