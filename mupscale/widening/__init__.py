"""Widening: layouts, roles, factors, weights, noise and optimizer state, combined in `upscale`."""
