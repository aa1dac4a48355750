"""Attention, layers and vocabulary projection with hand-written gradients."""
