"""Data modules: data on the training device, or memory-mapped from disk, that resumes exactly where a run stopped."""
