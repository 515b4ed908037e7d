"""For tests of policies: `assert_conforms(MyPolicy)` tries every property of the contract on it.

Needs hypothesis. The parts are in `schedlab.framework.testing`.
"""

from schedlab.framework.request import SLO
from schedlab.framework.testing.case import Case, Violation
from schedlab.framework.testing.conformance import again, assert_conforms, check
from schedlab.framework.testing.harness import TINY, Outcome, Spec, check_streams, run
from schedlab.framework.testing.report import PROPERTIES, Report, Verdict
from schedlab.framework.testing.strategies import cases, limits, specs

__all__ = [
    "PROPERTIES", "SLO", "TINY", "Case", "Outcome", "Report", "Spec", "Verdict", "Violation", "again", "assert_conforms",
    "cases", "check", "check_streams", "limits", "run", "specs",
]  # fmt: skip
