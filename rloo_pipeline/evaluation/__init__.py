"""Accuracy, intervals, tests, and how rankings change: arrays in, numbers out."""
