"""The stages of the DAG, one file each: a stage reads files, calls the packages below and writes files."""
