"""Modules whose source is copied into a sandbox. They import only the standard library and each other."""
