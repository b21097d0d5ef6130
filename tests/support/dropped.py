"""Whether a drafter was dropped, which only the log says."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

from specdec.result import error_text


@contextlib.contextmanager
def drops_drafter(match: str = "") -> Iterator[None]:
    """Checks that meanwhile a drafter is dropped, and that the log says why."""
    logger, handler, told = logging.getLogger("specdec.drafters.guard"), logging.Handler(), []
    handler.emit = lambda record: told.append(  # type: ignore[method-assign]
        f"{record.getMessage()}: {error_text(record.exc_info[1])}"
    )
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert any(re.search(match, text) for text in told), (match, told)
