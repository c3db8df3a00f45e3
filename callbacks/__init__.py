"""Callbacks: growth in the middle of a run, and the curves that show it."""
