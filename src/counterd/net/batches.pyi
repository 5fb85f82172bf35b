SECONDS_BOUNDS: tuple[float, ...]
BYTES_BOUNDS: tuple[float, ...]

class Batches:
    def counts(self) -> tuple[tuple[int, ...], int, tuple[int, ...], int]: ...
