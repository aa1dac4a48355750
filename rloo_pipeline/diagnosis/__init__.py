"""The symptoms of a run, diagnosed from its metrics."""
