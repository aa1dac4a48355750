"""The algorithm as pure tensor functions: no files, no model, no configuration. Imports torch only."""
