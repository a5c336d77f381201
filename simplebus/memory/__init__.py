"""Package memory."""
