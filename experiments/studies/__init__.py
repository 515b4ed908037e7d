"""Questions that take many runs or measurements: capacity, fidelity, cost profiles, leaderboards, reproductions."""
