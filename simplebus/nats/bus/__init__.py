"""Package bus."""
