"""The command `rloo`: one module a group of commands; each parses and calls a stage or a command."""
