"""Package subscription."""
