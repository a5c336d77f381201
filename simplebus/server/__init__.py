"""The trio server around the engine."""
