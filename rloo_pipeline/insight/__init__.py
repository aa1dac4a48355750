"""What a run tells people: evaluation statistics, checks, the report."""
