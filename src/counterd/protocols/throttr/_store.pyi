from counterd._core import Store

COMMAND_NAMES: dict[int, str]
CONSTANTS: dict[str, int]
KEY_BYTES: int

class ThrottrStore(Store): ...
