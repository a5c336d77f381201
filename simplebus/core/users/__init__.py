"""Package users."""
