"""A task and a model small enough to learn on two CPU cores."""
