"""Calls user functions (rewards, tools, environments) in processes with deadlines, optionally in a sandbox."""
