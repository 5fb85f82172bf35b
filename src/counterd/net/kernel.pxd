# The kernel's functions for sockets and epoll.
#
# Floor 3, header only: declarations and small helpers.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport strerror

cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        void* ptr
        uint64_t u64
    cdef struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int flags)
    int epoll_ctl(int epfd, int op, int fd, epoll_event* event)
    int epoll_wait(int epfd, epoll_event* events, int maxevents, int timeout)
    int EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP, EPOLLRDHUP, EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLL_CTL_DEL, EPOLL_CLOEXEC

cdef extern from "<sys/ioctl.h>" nogil:
    int ioctl(int fd, unsigned long request, void* argument)
    unsigned long FIONREAD

cdef extern from "<netinet/in.h>" nogil:
    cdef struct in_addr:
        uint32_t s_addr
    cdef struct in6_addr:
        uint8_t[16] s6_addr
    cdef struct sockaddr_in:
        uint16_t sin_family
        uint16_t sin_port
        in_addr sin_addr
    cdef struct sockaddr_in6:
        uint16_t sin6_family
        uint16_t sin6_port
        in6_addr sin6_addr
    uint16_t ntohs(uint16_t number)

cdef extern from "<sys/socket.h>" nogil:
    int accept4(int fd, void* address, unsigned int* size, int flags)
    ssize_t c_send "send"(int fd, const void* data, size_t size, int flags)
    ssize_t c_recv "recv"(int fd, void* data, size_t size, int flags)
    int c_shutdown "shutdown"(int fd, int how)
    int getsockopt(int fd, int level, int name, void* value, unsigned int* size)
    int setsockopt(int fd, int level, int name, const void* value, unsigned int size)
    int MSG_DONTWAIT, MSG_NOSIGNAL, SHUT_WR, SOCK_CLOEXEC, SOCK_NONBLOCK, SOL_SOCKET, SO_ERROR
    int AF_INET, AF_INET6, SO_KEEPALIVE, SO_PEERCRED, SO_PEERGROUPS
    cdef struct ucred:
        int pid
        uint32_t uid
        uint32_t gid


cdef inline os_error(int number):
    """Makes an OSError from an errno. Returns None if the errno is 0."""
    return OSError(number, strerror(number).decode()) if number else None


cdef inline int socket_error(int fd) noexcept:
    """Returns the pending error of a socket (SO_ERROR) as an errno. 0 means no error."""
    cdef int error = 0
    cdef unsigned int size = sizeof(error)
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size)
    return error
