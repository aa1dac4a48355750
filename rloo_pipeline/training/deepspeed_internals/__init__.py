"""All that knows internals of DeepSpeed: with `runtime/used_internals.py`, what a newer release may change."""
