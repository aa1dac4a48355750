"""Accuracy, intervals, tests and changes of rankings: arrays in, numbers out."""
