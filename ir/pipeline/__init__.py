"""Pipeline schedules as data: which lane runs which action of which micro-batch, in which order."""
