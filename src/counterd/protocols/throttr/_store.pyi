from counterd._core import Store

KEY_BYTES: int

class ThrottrStore(Store): ...
