"""The demo: tasks, and models that learn them on two CPU cores."""
