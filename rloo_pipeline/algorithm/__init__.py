"""The algorithm as pure tensor functions, without files, models or configuration."""
