# The channels of the throttr protocol and their subscriptions.
#
# Floor 2, header only. A channel is a permit. A subscription is a holding of it, and the amount is how often the
# connection is subscribed. So the ledger finds subscriptions, and ends those of a gone connection. The other figures of
# both are in separate arrays, under the same numbers.
#
# Invariants (ThrottrStore.audit checks each):
# - a channel exists as long as a connection is subscribed to it;
# - a connection is subscribed to a channel at most SUBSCRIBED_MAX times.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.connections cimport Connections
from counterd.engine.permits cimport (
    Permits, ledger_find, permit_drop, permit_hold, permits_reserve,
)
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport table_find

cdef enum:
    SUBSCRIBED_MAX = 16     # times that a connection can be subscribed to one channel


cdef struct Channel:        # beside each permit
    uint64_t read_bytes
    uint64_t write_bytes
    uint32_t epoch          # when it was made: listings that began earlier do not show it


cdef struct Subscription:   # beside each holding
    int64_t since_ns        # Unix time
    uint64_t read_bytes
    uint64_t write_bytes
    uint32_t epoch          # likewise


cdef struct Channels:       # this process's view
    Permits permits
    Channel* channels       # by permit
    Subscription* subscriptions  # by holding


cdef inline int channels_reserve(
    Channels* channels, Region* region, Connections* connections, uint32_t channel_max, uint32_t subscription_max
) except -1:
    """Reserves memory for channels and subscriptions. Raises ValueError if these are too many."""
    permits_reserve(&channels.permits, region, connections, channel_max, subscription_max)
    region_reserve(
        region, b"channels", (<size_t>channel_max + 1) * sizeof(Channel), <void**>&channels.channels
    )
    region_reserve(
        region, b"subscriptions", (<size_t>subscription_max + 1) * sizeof(Subscription),
        <void**>&channels.subscriptions
    )
    return 0


cdef inline uint32_t channel_find(
    const Channels* channels, uint32_t tag, const uint8_t* name, uint32_t size
) noexcept nogil:
    """Returns the channel with this name, or 0 if there is none."""
    return table_find(&channels.permits.table, tag, name, size)


cdef inline uint32_t subscription_find(
    const Channels* channels, uint32_t connection, uint32_t tag, const uint8_t* name, uint32_t size
) noexcept nogil:
    """Returns the connection's subscription to a channel, or 0 if there is none."""
    cdef uint32_t number = channel_find(channels, tag, name, size)
    return ledger_find(&channels.permits, connection, number, tag) if number else 0


cdef inline uint32_t channel_enter(
    Channels* channels, uint32_t connection, uint32_t tag, const uint8_t* name, uint32_t size,
    int64_t since_ns, uint32_t since_tenths, uint32_t epoch
) noexcept nogil:
    """Subscribes a connection once more to a channel. Makes the channel if it does not exist.

    Returns how often the connection is subscribed now. Returns 0 if there is no room, or if it is already subscribed
    SUBSCRIBED_MAX times.
    since_ns: Unix time. since_tenths: the time on the caller's clock.
    """
    cdef Permits* permits = &channels.permits
    cdef bint is_new = channel_find(channels, tag, name, size) == 0
    cdef uint32_t entry = 0 if is_new else subscription_find(channels, connection, tag, name, size)
    if entry and permits.holdings[entry].amount >= SUBSCRIBED_MAX:
        return 0
    entry = permit_hold(permits, connection, tag, name, size, since_tenths)
    if entry == 0:
        return 0
    if is_new:
        channels.channels[permits.holdings[entry].record] = Channel(0, 0, epoch)
    if permits.holdings[entry].amount == 1:
        channels.subscriptions[entry] = Subscription(since_ns, 0, 0, epoch)
    return permits.holdings[entry].amount


cdef inline uint32_t channel_leave(
    Channels* channels, uint32_t connection, uint32_t tag, const uint8_t* name, uint32_t size
) noexcept nogil:
    """Ends all subscriptions of a connection to a channel. Returns how many there were."""
    cdef uint32_t entry = subscription_find(channels, connection, tag, name, size)
    cdef uint32_t times
    if entry == 0:
        return 0
    times = channels.permits.holdings[entry].amount
    permit_drop(&channels.permits, entry)
    return times
