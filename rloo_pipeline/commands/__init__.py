"""Commands that users run; no rule calls them."""
