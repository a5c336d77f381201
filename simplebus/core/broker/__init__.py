"""Package broker."""
