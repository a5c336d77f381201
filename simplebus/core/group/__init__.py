"""Package group."""
