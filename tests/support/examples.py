"""How many examples a property gets: modest by default, ``INTERLOCK_EXAMPLES=20`` times as many in
a long run."""

import os
from typing import Final

from hypothesis import HealthCheck, Phase, settings

FACTOR: Final = int(os.environ.get("INTERLOCK_EXAMPLES", "1"))


def examples(count: int) -> settings:
    """The settings of a property with ``count`` examples in an ordinary run."""
    return settings(
        max_examples=count * FACTOR,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def first_failure(count: int) -> settings:
    """The settings for a property that is expected to fail: the same examples every time, and
    nothing is made smaller."""
    return settings(
        parent=examples(count),
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
    )
