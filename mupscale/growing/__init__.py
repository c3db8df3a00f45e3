"""`upscale`: a plan, its check, and the search for a better one where the check fails."""
