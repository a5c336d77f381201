"""Package read."""
