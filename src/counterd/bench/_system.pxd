# What only the load process asks of the kernel.
#
# Floor 5, header only: declarations, and the calls that take more than a line.

from libc.stdint cimport int64_t
from posix.time cimport CLOCK_PROCESS_CPUTIME_ID, clock_gettime, timespec

from counterd.net.kernel cimport SOCK_CLOEXEC, SOCK_NONBLOCK, SOL_SOCKET, setsockopt

cdef extern from "<poll.h>" nogil:
    cdef struct pollfd:
        int fd
        short events
        short revents
    int ppoll(pollfd* fds, unsigned long count, const timespec* timeout, const void* signals)
    int POLLIN

cdef extern from "<sys/socket.h>" nogil:
    cdef struct sockaddr:
        pass
    cdef struct Linger "linger":
        int l_onoff
        int l_linger
    int c_socket "socket"(int family, int kind, int protocol)
    int c_connect "connect"(int fd, const sockaddr* address, unsigned int size)
    int AF_UNIX, SOCK_STREAM, SO_LINGER

cdef extern from "<netinet/tcp.h>" nogil:
    int TCP_NODELAY

cdef extern from "<netinet/in.h>" nogil:
    int IPPROTO_TCP

cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int option, unsigned long value)
    int PR_SET_TIMERSLACK


cdef inline int stream_socket(int family) noexcept:
    """Returns the descriptor of a new socket, or -1 and errno."""
    cdef int one = 1
    cdef int fd = c_socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)
    if fd >= 0 and family != AF_UNIX:
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one))
    return fd


cdef inline void reset_at_close(int fd) noexcept:
    """Makes the kernel send RST when the socket is closed, as if the process had died with unread replies."""
    cdef Linger linger
    linger.l_onoff = 1
    linger.l_linger = 0
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger))


cdef inline void sleep_ns(int poll, long time) noexcept:
    """Sleeps for less than a second, or until the epoll set has an event."""
    cdef pollfd polled
    cdef timespec nap
    polled.fd = poll
    polled.events = POLLIN
    nap.tv_sec = 0
    nap.tv_nsec = time
    ppoll(&polled, 1, &nap, NULL)


cdef inline int64_t process_cpu_ns() noexcept:
    cdef timespec now
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now)
    return <int64_t>now.tv_sec * 1000000000 + now.tv_nsec
