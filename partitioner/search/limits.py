"""Sizes up to which each device is planned and listed by itself."""

#: Most devices with a column each in the joint problem, where levels could be searched instead.
EXPLICIT = 16
#: Most nodes times devices of such a problem.
EXPLICIT_NODES = 10_000
#: Most devices with a column each where a request needs that, and with programs and timelines.
MOST_EXPLICIT = 64
