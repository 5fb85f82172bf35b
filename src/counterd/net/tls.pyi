import ssl

class TlsFailed(Exception):
    cause: str
    reason: str
    def __init__(self, cause: str, reason: str) -> None: ...

class Tls:
    def __init__(self, context: ssl.SSLContext) -> None: ...
    def describe(self) -> tuple[str, str, str]: ...
