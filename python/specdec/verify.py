"""``specdec.evaluation.verify`` under a shorter name."""

from .evaluation.verify import *  # noqa: F403
from .evaluation.verify import __all__ as __all__
