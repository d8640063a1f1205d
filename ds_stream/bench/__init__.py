"""Measurements of settings and of the host, and forecasts of other machines."""
