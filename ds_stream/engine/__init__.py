"""Carries out the instructions of the schedule on one rank."""
