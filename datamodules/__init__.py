"""Data on the training device, or mapped from disk, that resumes exactly where a run stopped."""
