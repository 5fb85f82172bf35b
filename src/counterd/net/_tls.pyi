import ssl

from counterd.net._poller import Transport
from counterd.net.server import Server

class TlsTransport(Transport):
    def __init__(self, context: ssl.SSLContext, server: Server) -> None: ...
