"""Checks model, data, rewards and node, and estimates queue, memory and hours, before a run begins. Changes nothing."""
