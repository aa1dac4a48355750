"""The pages about a run, an experiment or a comparison, and the data that they show."""
