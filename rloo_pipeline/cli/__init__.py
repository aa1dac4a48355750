"""The command `rloo`. Each module holds a group of commands, which parse arguments and call a stage or a command."""
