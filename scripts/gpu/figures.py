"""What a check finds, and how it is printed and written. No JAX here."""

import dataclasses
import re
from collections.abc import Sequence

_COLUMNS = "{:<11} {:<52} {:>10} {:>10}  {}"


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of a check.

    Attributes:
      name: what was measured, unique in its check.
      value: of it.
      unit: of the value; empty for a ratio, an error or a number.
      limit: what it may be at most; None where it is only told.
    """

    name: str
    value: float
    unit: str = ""
    limit: float | None = None

    @property
    def verdict(self) -> str:
        """PASS or FAIL, or "-" without a limit; a NaN is in no limit."""
        if self.limit is None:
            return "-"
        return "PASS" if self.value <= self.limit else "FAIL"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a check has no, or no further, figures."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: a check and what it says."""

    check: str
    found: Figure | Failure

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return isinstance(self.found, Figure) and self.found.verdict != "FAIL"

    def __str__(self) -> str:
        """The line, without its end."""
        if isinstance(self.found, Failure):
            return f"{self.check:<11} FAIL  {self.found.reason}"
        figure = self.found
        value = f"{figure.value:.4g}"
        limit = "" if figure.limit is None else f"{figure.limit:.4g}"
        name = f"{figure.name}, {figure.unit}" if figure.unit else figure.name
        return _COLUMNS.format(self.check, name, value, limit, figure.verdict)


def heading() -> str:
    """Returns the first line of the table."""
    return _COLUMNS.format("check", "what", "value", "at most", "")


def flat(rows: Sequence[Row]) -> dict[str, float | str | bool]:
    """Returns one flat object: figures and their verdicts by name, and the whole one.

    The keys are `CHECK_NAME_UNIT`, that with `_verdict` where there is a limit, and
    `CHECK_failure`.
    """
    found: dict[str, float | str | bool] = {}
    for row in rows:
        if isinstance(row.found, Failure):
            found[f"{row.check}_failure"] = row.found.reason
            continue
        figure = row.found
        key = _key(row.check, figure.name, figure.unit)
        found[key] = figure.value
        if figure.limit is not None:
            found[f"{key}_verdict"] = figure.verdict
    return {**found, "passed": has_passed(rows)}


def has_passed(rows: Sequence[Row]) -> bool:
    """Whether all rows, of which there are some, have passed."""
    return bool(rows) and all(row.passed for row in rows)


def _key(*words: str) -> str:
    text = " ".join(word for word in words if word).lower()
    text = text.replace("+", " and ").replace("/", " per ")
    return re.sub(r"[^a-z0-9]+", "_", text).strip("_")
