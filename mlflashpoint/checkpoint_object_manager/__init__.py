"""The stores that a process has open, for code that names its base container in a path."""
