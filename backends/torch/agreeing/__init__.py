"""Agreement between ranks: their groups, what they compare, and what failed where."""
