"""Guards that refuse changes and calls which a rank's graphs would not notice."""
