"""Attention and vocabulary projection with hand-written gradients."""
