"""Package source."""
