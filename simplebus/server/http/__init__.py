"""Package http."""
