"""Package net."""
