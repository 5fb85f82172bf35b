"""Units of time in ns, and the exception for a broken promise, for property tests and simulations."""

US, MS, SECOND = 1_000, 1_000_000, 1_000_000_000


class Violation(Exception):
    """A promise was broken: `invariant` is its name."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
