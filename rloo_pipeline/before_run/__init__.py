"""Looks at model, data, rewards, node, queue, memory and hours before a run begins, and changes nothing."""
