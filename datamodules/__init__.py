"""Data that is resident on the training device and resumes exactly where a run stopped."""
