"""Package session."""
