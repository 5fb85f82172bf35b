"""The connection table of a server, which admits connections and finds them.

Floor 3 (ARCHITECTURE.md). An admitted connection is first in `arriving`, and counts against every limit. When the
connection gets its session, immediately or after the TLS handshake, it moves to `connections`, under the engine's
number.

- The engine can reuse a number as soon as its session has ended. If the connection of that session is still sending
  replies, it moves to another key: its number minus its serial number.
- A request can give a session the number of another session; then the two numbers are exchanged.
- The keys of `connections` are the numbers of its connections. Each address in `addresses` has at least one connection.
"""

from functools import partial

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from posix.unistd cimport close as c_close

from counterd.net.connection cimport Common, Connection
from counterd.net.poller cimport Acceptor, Poller
from counterd.net.stream cimport Stream
from counterd.net.tls cimport Tls

from counterd.net.admission import refusal
from counterd.net.connection import peer_process


cdef class Table:
    """The connections of a server with these limits."""

    cdef object _limits
    cdef Py_ssize_t max_connections
    cdef bint guarded               # there are limits on who may connect, or how often
    cdef public object context      # TLS context of new TCP connections; None = they are plain
    cdef public object watch        # called with "opened" or "closed" and the connection; or None
    cdef readonly dict connections  # connections with a session, by the engine's number
    cdef readonly set arriving      # admitted connections whose handshake is under way
    cdef readonly dict addresses    # the number of connections by IP address (4 or 16 bytes)
    cdef uint64_t serial            # of the last connection that entered
    cdef uint32_t highest           # the highest number that a connection has had

    def __cinit__(self, limits):
        self.connections = {}
        self.arriving = set()
        self.addresses = {}
        self.limits = limits

    def __len__(self):
        """Returns the number of connections, with or without a session."""
        return len(self.connections) + len(self.arriving)

    @property
    def limits(self):
        """The server's limits, which can change while the server runs. The table applies its limits to new connections.
        """
        return self._limits

    @limits.setter
    def limits(self, limits):
        self._limits = limits
        self.max_connections = limits.max_connections
        self.guarded = not limits.is_open

    cdef refused(self, int fd, bytes address):
        """Returns a cause and a sentence if a connection is refused, or else None.

        The check is fast if max_connections is the only limit.
        """
        if not self.guarded and len(self) < self.max_connections:
            return None
        of_address = self.addresses.get(address, 0)
        return refusal(self._limits, address, partial(peer_process, fd), len(self), of_address)

    def enter(self, Connection connection not None):
        """Called when a connection has its session and the engine's number."""
        cdef Connection former = self.connections.pop(connection.number, None)
        if former is not None:
            former.number = -<int64_t>former.serial
            self.connections[former.number] = former
        self.serial += 1
        connection.serial = self.serial
        self.arriving.remove(connection)
        self.connections[connection.number] = connection
        self.highest = max(self.highest, <uint32_t>connection.number)
        if self.watch is not None:
            self.watch("opened", connection)

    def renumber(self, Connection connection not None):
        """Called when a session has got the number of another connection. If that other connection is open, it has this
        session's former number.
        """
        cdef int64_t former = connection.number
        cdef Connection other = self.connections.pop(connection.session_number(), None)
        del self.connections[former]
        connection.number = connection.session_number()
        self.connections[connection.number] = connection
        if other is not None:
            other.number = former if other.session_number() == former else -<int64_t>other.serial
            self.connections[other.number] = other

    def remove(self, Connection connection not None):
        """Called when a connection is gone."""
        if connection.address is not None:
            count = self.addresses.pop(connection.address)
            if count > 1:
                self.addresses[connection.address] = count - 1
        if connection.serial == 0:
            self.arriving.remove(connection)
            return
        del self.connections[connection.number]
        if self.watch is not None:
            self.watch("closed", connection)

    def find(self, str connection_id not None):
        """Returns the connection with this ID, or None."""
        number, _, _serial = connection_id.rpartition("-")
        try:
            connection = self.connections.get(int(number))
        except ValueError:
            return None
        return connection if connection is not None and connection.id == connection_id else None

    def idle_among(self, uint32_t first, uint32_t count, int64_t before_ns):
        """Returns the idle connections among `count` numbers from `first` on, and whether there are higher numbers.

        A connection is idle if it has sent nothing since before_ns, and the server was reading from it.
        """
        cdef Connection connection
        cdef int64_t number
        cdef list idle = []
        for number in range(first, <int64_t>first + count):
            connection = self.connections.get(number)
            if connection is not None and connection.is_idle(before_ns):
                idle.append(connection)
        return idle, number < self.highest


cdef class TableAcceptor(Acceptor):
    """Admits the connections of one listening socket to a table.

    common: the objects that the connections share; its events call the table's enter() and remove().
    secure: whether connections begin with a TLS handshake if the table has a context.
    patience: see Connection. number: the number of the protocol's port.
    """

    cdef Table table
    cdef Common common
    cdef Poller poller
    cdef bint secure
    cdef object patience
    cdef int number

    def __cinit__(
        self, Table table not None, Common common not None, Poller poller not None, bint secure, patience, int number=0
    ):
        self.table = table
        self.common = common
        self.poller = poller
        self.secure = secure
        self.patience = patience
        self.number = number

    cpdef accepted(self, int fd, bytes address, uint16_t port):
        """Serves a new connection, or closes it if it is refused."""
        cdef Table table = self.table
        cdef Connection connection
        cdef Stream stream
        cdef Tls tls = None
        try:
            reason = table.refused(fd, address)
            if reason is None and self.secure and table.context is not None:
                tls = Tls(table.context)
        except Exception:
            c_close(fd)
            raise
        if reason is not None:
            c_close(fd)
            self.common.events.rejected(*reason)
            return
        stream = Stream(self.poller, fd, tls)
        connection = Connection(self.common, stream, self.patience, address, port, self.number)
        table.arriving.add(connection)
        if address is not None:
            table.addresses[address] = table.addresses.get(address, 0) + 1
        try:
            connection.begin()
        except Exception:
            stream.abort()
            raise
