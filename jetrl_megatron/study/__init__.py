"""Studies: many runs, one table."""
