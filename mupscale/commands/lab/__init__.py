"""What `sweep` and `experiment` share: runs, the driver that makes them, search spaces, protocols, and results."""
