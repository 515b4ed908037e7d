"""Routers: which replica serves a request. One file each, beside what they share."""
