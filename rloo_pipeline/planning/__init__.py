"""Estimates a run's memory, jobs, tokens and hours before anything is queued."""
