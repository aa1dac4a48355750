"""vLLM as a function from prompt ids and seeds to completions."""
