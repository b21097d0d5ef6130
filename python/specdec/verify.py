"""``specdec.evaluation.verify`` under a shorter name."""

from .evaluation.verify import (
    Cell,
    DistributionResult,
    DistributionTest,
    TextResult,
    Verification,
    VerifySettings,
    verify,
)

__all__ = ["Cell", "DistributionResult", "DistributionTest", "TextResult", "Verification", "VerifySettings", "verify"]
