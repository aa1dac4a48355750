"""Runs untrusted programs: confinement of processes, and programs against tests."""
