"""Package authorization."""
