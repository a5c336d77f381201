"""Files behind the rings: what a bus keeps past its process."""
