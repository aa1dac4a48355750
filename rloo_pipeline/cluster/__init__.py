"""SLURM and Apptainer: jobs, allocations, multi-node ranks, images, profiles."""
