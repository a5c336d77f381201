"""Package tls."""
