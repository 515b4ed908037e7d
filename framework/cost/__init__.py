"""What a step costs: rooflines of known hardware, and profiles fitted to measured steps. Imports no torch."""
