"""Package publish."""
