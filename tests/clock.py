"""Time that passes when a test says so."""


class Clock:
    """Stands in for the `time` module of a file under test."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now
