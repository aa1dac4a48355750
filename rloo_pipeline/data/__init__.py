"""Dataset rows, prompts made from them, and models that a user's function builds."""
