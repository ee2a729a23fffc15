"""Problem files of other projects: read, priced as their authors do, written."""
