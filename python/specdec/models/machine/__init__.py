"""What memory and what processor there is."""
