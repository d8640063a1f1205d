"""Decides what enters the ring, and when."""
