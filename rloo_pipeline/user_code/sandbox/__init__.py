"""Runs untrusted programs: confines processes, and runs programs against tests."""
