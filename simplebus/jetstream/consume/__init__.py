"""Package consume."""
