"""From a dataset's rows to prompts."""
