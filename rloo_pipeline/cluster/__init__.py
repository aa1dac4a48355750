"""SLURM and Apptainer: jobs, allocations, ranks on several nodes, images, profiles."""
