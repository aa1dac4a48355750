"""Everything that uses internals of transformers: a newer release may require changes here, and nowhere else."""
