"""Calls functions of the user (rewards, tools, environments) in processes with deadlines, and in a sandbox."""
