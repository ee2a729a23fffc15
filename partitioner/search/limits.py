"""How many devices are treated one by one."""

#: Up to so many devices each has a column of its own in the problem, if it can be had otherwise.
EXPLICIT = 16
#: The same for nodes times devices.
EXPLICIT_NODES = 10_000
#: Up to so many devices each has one where a request needs it, and each has a program and a
#: timeline.
MOST_EXPLICIT = 64
