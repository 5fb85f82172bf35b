"""Chains of blocks with an interface for Python, for their test."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport calloc, free

from counterd.engine.chains cimport (
    Block, Chain, Chains, chain_blocks, chain_equals, chain_free, chain_read, chain_replace, chain_write,
)
from counterd.engine.pool cimport Pool, pool_left


cdef class ChainsOf:
    """`capacity` blocks, and any number of chains, which Python holds as (first, last, lead, size)."""

    cdef Chains chains
    cdef Pool pool

    def __cinit__(self, uint32_t capacity):
        self.pool.capacity = capacity
        self.chains = Chains(<Block*>calloc(capacity + 1, sizeof(Block)), &self.pool, capacity)
        if self.chains.blocks == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.chains.blocks)

    @property
    def left(self):
        return pool_left(&self.pool)

    def write(self, uint32_t lead, bytes data):
        cdef Chain chain
        chain_write(&self.chains, &chain, lead, <const uint8_t*>PyBytes_AS_STRING(data), <uint32_t>len(data))
        return chain.first, chain.last, lead, len(data)

    def replace(self, kept, bytes data):
        cdef Chain chain = Chain(kept[0], kept[1])
        chain_replace(&self.chains, &chain, kept[2], <const uint8_t*>PyBytes_AS_STRING(data), <uint32_t>len(data))

    def read(self, kept):
        cdef Chain chain = Chain(kept[0], kept[1])
        data = PyBytes_FromStringAndSize(NULL, kept[3])
        chain_read(&self.chains, &chain, kept[2], <uint8_t*>PyBytes_AS_STRING(data), kept[3])
        return data

    def equals(self, kept, bytes data):
        cdef Chain chain = Chain(kept[0], kept[1])
        return chain_equals(&self.chains, &chain, <const uint8_t*>PyBytes_AS_STRING(data), <uint32_t>len(data))

    def free(self, kept):
        cdef Chain chain = Chain(kept[0], kept[1])
        chain_free(&self.chains, &chain, chain_blocks(kept[2] + kept[3]))
