"""A linear program that is written down row by row, solved by HiGHS, and its value bounded by what its dual certifies.
Knows nothing of what it is about.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dovetail.errors import ConfigError, DovetailError

Term = tuple[int, float]  # (variable, factor)


class _Rows:
    """Of one kind, as a sparse matrix has them."""

    def __init__(self) -> None:
        self.rows: list[int] = []  # of the factors
        self.columns: list[int] = []
        self.factors: list[float] = []
        self.limits: list[float] = []  # by row

    def add(self, terms: Iterable[Term], limit: float) -> None:
        row = len(self.limits)
        for variable, factor in terms:
            self.rows.append(row)
            self.columns.append(variable)
            self.factors.append(factor)
        self.limits.append(limit)

    def matrix(self, sparse: Any, columns: int) -> Any:
        return sparse.csr_array((self.factors, (self.rows, self.columns)), shape=(len(self.limits), columns))


class LinearProgram:
    """Variables are at least 0."""

    def __init__(self) -> None:
        self._gains: list[float] = []  # by variable: what one unit of it is worth
        self._most: list[float] = []  # by variable
        self._at_most = _Rows()
        self._equal = _Rows()

    def variable(self, most: float, gain: float = 0.0) -> int:
        self._gains.append(gain)
        self._most.append(most)
        return len(self._gains) - 1

    def at_most(self, terms: Iterable[Term], limit: float = 0.0) -> None:
        """The sum is no more than this."""
        self._at_most.add(terms, limit)

    def equal(self, terms: Iterable[Term], value: float = 0.0) -> None:
        self._equal.add(terms, value)

    @property
    def size(self) -> tuple[int, int]:
        """Variables and rows."""
        return len(self._gains), len(self._at_most.limits) + len(self._equal.limits)

    def solve(self) -> tuple[list[float], float]:
        """Values of the variables with the largest total gain, and a gain that no values exceed: by weak duality
        any prices of the rows give one, so that it holds however well the solver has done."""
        np, optimize, sparse = _libraries()
        gains, most = np.array(self._gains), np.array(self._most)
        upper, equal = (rows.matrix(sparse, len(gains)) for rows in (self._at_most, self._equal))
        rows = {"A_ub": upper, "b_ub": self._at_most.limits} if self._at_most.limits else {}
        if self._equal.limits:
            rows |= {"A_eq": equal, "b_eq": self._equal.limits}
        result = optimize.linprog(-gains, **rows, bounds=np.column_stack([0 * most, most]), method="highs-ipm")
        if result.x is None:
            raise DovetailError(
                f"a linear program of {self.size[0]} variables and {self.size[1]} rows: {result.message}"
            )
        left, certified = gains, 0.0
        if self._at_most.limits:
            prices = np.maximum(-result.ineqlin.marginals, 0.0)
            left, certified = left - upper.T @ prices, certified + prices @ np.array(self._at_most.limits)
        if self._equal.limits:
            prices = -result.eqlin.marginals
            left, certified = left - equal.T @ prices, certified + prices @ np.array(self._equal.limits)
        return list(result.x), float(certified + np.maximum(left, 0.0) @ most)


def _libraries() -> tuple[Any, Any, Any]:
    try:
        import numpy as np
        from scipy import optimize, sparse
    except ImportError as error:
        raise ConfigError("a bound needs scipy: pip install 'dovetail[plan]'") from error
    return np, optimize, sparse
