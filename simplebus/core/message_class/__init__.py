"""Package message_class."""
