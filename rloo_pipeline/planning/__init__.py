"""What a run will take before anything is queued: memory, jobs, tokens, hours."""
