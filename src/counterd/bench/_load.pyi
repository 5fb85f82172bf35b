import ssl

from counterd.bench._board import Board
from counterd.bench.plan import Plan

class Load:
    def __init__(
        self, plan: Plan, board: Board, index: int, address: bytes, context: ssl.SSLContext | None = None
    ) -> None: ...
    def run(self) -> None: ...
