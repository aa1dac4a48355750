"""What a person types and no rule calls."""
