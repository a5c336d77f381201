"""Package target."""
