# Chains of blocks: bytes that do not fit into a record. Memory does not fragment, and a chain is freed in one step.
#
# Floor 1. Blocks are cells of a pool and are linked by number; a store's tables share one pool of them.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from counterd.engine.pool cimport Pool
from counterd.engine.region cimport Region

cdef enum:
    BLOCK_SIZE = 64         # a cache line
    BLOCK_PAYLOAD = 60      # without the number of the next block


cdef struct Block:
    uint32_t next           # the next block; also links the free list
    uint8_t payload[BLOCK_PAYLOAD]


cdef struct Chain:          # the last block is stored, so that the chain is freed in one step
    uint32_t first
    uint32_t last


cdef struct Chains:         # this process's view
    Block* blocks
    Pool* pool
    uint32_t capacity       # blocks


cdef int chains_reserve(Chains* chains, Region* region, uint64_t capacity) except -1
cdef void chains_begin(Chains* chains) noexcept nogil
cdef void chain_write(
    const Chains* chains, Chain* chain, uint32_t lead, const uint8_t* data, uint32_t size
) noexcept nogil
cdef void chain_replace(
    const Chains* chains, const Chain* chain, uint32_t lead, const uint8_t* data, uint32_t size
) noexcept nogil
cdef void chain_read(
    const Chains* chains, const Chain* chain, uint32_t lead, uint8_t* target, uint32_t size
) noexcept nogil
cdef bint chain_equals(const Chains* chains, const Chain* chain, const uint8_t* data, uint32_t size) noexcept nogil
cdef void chain_free(const Chains* chains, const Chain* chain, uint32_t count) noexcept nogil


cdef inline uint32_t chain_blocks(uint32_t size) noexcept nogil:
    """Returns how many blocks `size` bytes need."""
    return (size + BLOCK_PAYLOAD - 1) // BLOCK_PAYLOAD
