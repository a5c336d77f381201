"""What a file, the environment and flags say, as values, and every mistake in it."""
