"""For tests of policies and engines: random traces, tiny engines, and what every stream must be.

Needs hypothesis (extra `dev`) for the strategies only. Knows the stub and the books; knows no policy.
"""
