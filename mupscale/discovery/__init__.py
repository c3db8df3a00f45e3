"""How an unprepared model grows: layouts, roles and units, found by comparing two models."""
