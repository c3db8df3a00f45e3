"""What `sweep` and `experiment` share: runs, the driver that makes them, search spaces, protocols, and results."""

MOST_DEATHS = 3
"""How often the process, or node, of a job may die before the command ends: a trial itself may be the cause."""
