# What the load process asks of the kernel.
#
# A side, header only: declarations, and the calls that take more than a line.

from libc.stdint cimport int64_t, uint32_t, uint64_t
from posix.time cimport CLOCK_PROCESS_CPUTIME_ID, clock_gettime, timespec

cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        uint64_t u64
    cdef struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int flags)
    int epoll_ctl(int epfd, int op, int fd, epoll_event* event)
    int epoll_wait(int epfd, epoll_event* events, int maxevents, int timeout)
    int EPOLLIN, EPOLLOUT, EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLL_CLOEXEC

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
    ssize_t c_send "send"(int fd, const void* data, size_t size, int flags)
    ssize_t c_recv "recv"(int fd, void* data, size_t size, int flags)
    int getsockopt(int fd, int level, int name, void* value, unsigned int* size)
    int setsockopt(int fd, int level, int name, const void* value, unsigned int size)
    int AF_UNIX, SOCK_STREAM, SOCK_NONBLOCK, SOCK_CLOEXEC, SOL_SOCKET, SO_ERROR, SO_LINGER, MSG_DONTWAIT, MSG_NOSIGNAL

cdef extern from "<netinet/tcp.h>" nogil:
    int TCP_NODELAY

cdef extern from "<netinet/in.h>" nogil:
    int IPPROTO_TCP

cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int option, unsigned long value)
    int PR_SET_TIMERSLACK


cdef inline int stream_socket(int family) noexcept:
    """A descriptor, or -1 and errno."""
    cdef int one = 1
    cdef int fd = c_socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)
    if fd >= 0 and family != AF_UNIX:
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one))
    return fd


cdef inline int socket_error(int fd) noexcept:
    """What became of a connect; 0 = it is connected."""
    cdef int error = 0
    cdef unsigned int size = sizeof(error)
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size)
    return error


cdef inline void reset_at_close(int fd) noexcept:
    """The kernel is to send RST, as if the process had died with answers unread."""
    cdef Linger linger
    linger.l_onoff = 1
    linger.l_linger = 0
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger))


cdef inline void sleep_ns(int poll, long time) noexcept:
    """Under a second, or until the epoll set has something to tell."""
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
