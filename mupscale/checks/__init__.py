"""Checks: dynamic equivalence in numbers, the coordinate check, and the infinite-width limits of the paper."""
