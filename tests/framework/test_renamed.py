"""What policy authors wrote against the last version goes on to work, and says what it is called."""

import pytest

from schedlab.framework.policy import Policy
from schedlab.policies import common


@pytest.mark.parametrize(
    ("old", "new"), [("make_room", "grant_with_preemption"), ("make_way", "preempt_to_admit"), ("admits", "can_admit")]
)
def test_a_helper_by_its_old_name_is_the_helper_and_warns(old, new):
    with pytest.warns(DeprecationWarning, match=rf"{old} is called {new}") as caught:
        assert getattr(common, old) is getattr(common, new)
    assert caught[0].filename == __file__, "the line that has the old name"


def test_no_other_name_is_made_up():
    with pytest.raises(AttributeError, match="has no attribute 'make_space'"):
        common.make_space  # noqa: B018 - reading it is the test


def test_unbounded_is_read_as_no_bound_on():
    with pytest.warns(DeprecationWarning, match="Old.unbounded is called no_bound_on"):

        class Old(Policy):
            unbounded = {"gap": "prompts come first", "waiting": "others overtake"}  # noqa: RUF012 - as authors wrote

    assert Old.no_bound_on == {"inter_token_latency": "prompts come first", "waiting": "others overtake"}
