"""What people read of a plan in a terminal."""
