"""What runs inside of a sandbox; imports the standard library alone."""
