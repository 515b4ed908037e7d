"""Finished runs, from their files alone: tables, pictures, explanations, verdicts, and the run executed again."""
