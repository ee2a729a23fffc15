"""Files of ranks: exported programs, written, and read without running what is in them."""
