"""Everything that uses internals of DeepSpeed: a newer release may require changes here, and nowhere else."""
