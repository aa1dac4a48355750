"""Modules whose source is copied into a sandbox: they import only the standard library and each other."""
