"""Tools and environments to use as they are or to copy."""
