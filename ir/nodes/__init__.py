"""Facts of nodes that follow from their rows: writes in place, offers, loads, one device's node."""
