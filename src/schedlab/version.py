"""The version, for modules that `schedlab` itself names."""

__version__ = "0.1.0"
