"""Package server."""
