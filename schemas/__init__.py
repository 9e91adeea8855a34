"""JSON Schema files: what every payload may be. Data only."""
