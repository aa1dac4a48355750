"""All code that touches the internals of Snakemake or its plugins."""
