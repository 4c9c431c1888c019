"""Where an evaluation's wall time goes, by named stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Stages(dict[str, float]):
    """Stage -> seconds. A stage entered more than once adds up; stages may nest."""

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `name`, also when it ends in an exception."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.perf_counter() - start
