"""Package ring."""
