"""Measured kernel tables of public sources, and the step times that they add up to."""
