"""Environments and tools that a model uses in rollouts of several turns: the contract, the processes, built-in ones."""
