"""Models as they come from outside: read, checked, and with a name for everything."""
