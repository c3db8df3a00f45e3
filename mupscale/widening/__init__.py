"""What grows, and how: layouts, roles, factors, weights, noise and optimizer state, put together by `upscale`."""
