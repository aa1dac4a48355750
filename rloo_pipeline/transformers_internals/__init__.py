"""All that knows internals of transformers: with `runtime/used_internals.py`, what a newer release may change."""
