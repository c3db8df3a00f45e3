"""How a model grows that nobody prepared: layouts, roles and units found by comparing two models."""
