"""A package that cannot be imported."""

raise RuntimeError("this package was never finished")
