"""Package redelivery."""
