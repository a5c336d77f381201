"""Package protocol."""
