"""What a run leaves: its tables, digest, summary and files, and every definition of a metric once."""
