"""The symptoms of a run, from its metrics."""
