"""Commands that users run and no rule calls."""
