"""The embedded sample trace and the script that makes it."""
