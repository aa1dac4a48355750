"""The pages of a run and of a comparison, and what they show."""
