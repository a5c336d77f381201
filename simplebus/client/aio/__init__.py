"""Package aio."""
