"""The demo: a task and a model that learns it on two CPU cores."""
