"""Many trainings of one architecture as one program on one device."""
