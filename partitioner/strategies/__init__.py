"""What may be done with each node: cuts of its factors on a device group."""
