# What the load process asks of the kernel.
#
# A side, header only: declarations, and the one call that wants wrapping.

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


cdef inline int64_t process_cpu_ns() noexcept:
    cdef timespec now
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now)
    return <int64_t>now.tv_sec * 1000000000 + now.tv_nsec
