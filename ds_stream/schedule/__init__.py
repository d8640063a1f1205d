"""The temporal pipe schedule: integers in, instructions out."""
