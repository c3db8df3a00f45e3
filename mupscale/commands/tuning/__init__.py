"""What `sweep` and `experiment` share: search spaces, studies that several processes work on, trials, and results."""
