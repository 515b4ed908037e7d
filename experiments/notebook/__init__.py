"""What the commands do, as functions whose results a notebook shows: tables, pictures and data frames."""
