"""Chains of blocks: bytes that do not fit into a record. Memory does not fragment, and a chain is freed in one step.

Floor 1 (ARCHITECTURE.md). chains.pxd has the interface, the types and the invariants.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from counterd.engine.debug cimport debug_check
from counterd.engine.pool cimport Pool, pool_take
from counterd.engine.region cimport Region, region_reserve


cdef int chains_reserve(Chains* chains, Region* region, uint64_t capacity) except -1:
    """Reserves memory for `capacity` blocks. Raises ValueError if there are too many blocks for numbers of 32 bits."""
    if capacity >= <uint64_t>0xffffffff:
        raise ValueError(f"at most {0xfffffffe} blocks of {BLOCK_SIZE} bytes, not {capacity}")
    chains.capacity = <uint32_t>capacity
    region_reserve(region, b"blocks state", sizeof(Pool), <void**>&chains.pool)
    region_reserve(region, b"blocks", (<size_t>capacity + 1) * sizeof(Block), <void**>&chains.blocks)
    return 0


cdef void chains_begin(Chains* chains) noexcept nogil:
    """Call this once, after the region was mapped."""
    chains.pool.capacity = chains.capacity


cdef void chain_write(
    const Chains* chains, Chain* chain, uint32_t lead, const uint8_t* data, uint32_t size
) noexcept nogil:
    """Makes a chain for lead + size bytes. The caller writes the first `lead` bytes, at most BLOCK_PAYLOAD, itself.

    The caller must have checked that enough blocks are free.
    """
    cdef uint32_t position = 0, start = lead
    cdef uint32_t piece, block
    chain.first = 0
    while position < size or (lead and chain.first == 0):
        block = pool_take(chains.pool, &chains.blocks.next, sizeof(Block))
        debug_check(block != 0)
        piece = min(BLOCK_PAYLOAD - start, size - position)
        memcpy(chains.blocks[block].payload + start, data + position, piece)
        chains.blocks[block].next = 0
        if chain.first:
            chains.blocks[chain.last].next = block
        else:
            chain.first = block
        chain.last = block
        position += piece
        start = 0


cdef void chain_replace(
    const Chains* chains, const Chain* chain, uint32_t lead, const uint8_t* data, uint32_t size
) noexcept nogil:
    """Overwrites the bytes of a chain with other bytes that need as many blocks."""
    cdef uint32_t position = 0, start = lead, block = chain.first
    cdef uint32_t piece
    while position < size:
        piece = min(BLOCK_PAYLOAD - start, size - position)
        memcpy(chains.blocks[block].payload + start, data + position, piece)
        block = chains.blocks[block].next
        position += piece
        start = 0


cdef void chain_read(
    const Chains* chains, const Chain* chain, uint32_t lead, uint8_t* target, uint32_t size
) noexcept nogil:
    cdef uint32_t position = 0, start = lead, block = chain.first
    cdef uint32_t piece
    while position < size:
        piece = min(BLOCK_PAYLOAD - start, size - position)
        memcpy(target + position, chains.blocks[block].payload + start, piece)
        block = chains.blocks[block].next
        position += piece
        start = 0


cdef bint chain_equals(
    const Chains* chains, const Chain* chain, const uint8_t* data, uint32_t size
) noexcept nogil:
    cdef uint32_t position = 0, block = chain.first
    cdef uint32_t piece
    while position < size:
        piece = min(<uint32_t>BLOCK_PAYLOAD, size - position)
        if memcmp(chains.blocks[block].payload, data + position, piece) != 0:
            return False
        block = chains.blocks[block].next
        position += piece
    return True


cdef void chain_free(const Chains* chains, const Chain* chain, uint32_t count) noexcept nogil:
    """Frees a chain in one step. count: how many blocks it has, at least one."""
    chains.blocks[chain.last].next = chains.pool.free
    chains.pool.free = chain.first
    chains.pool.used -= count
