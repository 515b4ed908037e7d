"""One run: from words or Python to a run directory, a line and a W&B run."""
