"""Package preauth."""
