"""Package blocking."""
