"""Package serve."""
