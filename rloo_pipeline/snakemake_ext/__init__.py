"""Every line that touches the insides of Snakemake or of one of its plugins."""
