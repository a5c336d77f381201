"""Package channel."""
