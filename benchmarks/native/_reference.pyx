"""A fixed piece of work in the shape of the engine's, to hold the engine's time against. Built by __init__.py.

Frozen: it takes nothing from counterd, its hash is its own copy, and a change of this file makes every stored ratio
worthless (benchmarks/regress.py refuses to compare across one). Whatever changes its speed is the machine, and that
changes the engine's as well.

As in the engine, 64 keys are taken at a time: all are hashed and their slots asked for, then their records, then each
is looked up, compared, counted in its 64-byte record, and answered with 16 bytes. A small table stays in the cache;
one of the engine's size does not, and then both wait for the same memory in the same way.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap

cdef extern from *:
    void prefetch "__builtin_prefetch"(const void* address) noexcept nogil

cdef enum:
    KEY_SIZE = 16
    BATCH = 64
    REPLY = 16


cdef struct Slot:
    uint32_t tag
    uint32_t number     # of a record; 0 = empty


cdef struct Entry:      # 64 bytes, a cache line
    uint32_t tag
    uint32_t spare
    uint8_t key[KEY_SIZE]
    uint64_t count
    uint64_t last
    uint8_t padding[24]


cdef inline uint64_t rotated(uint64_t value, int bits) noexcept nogil:
    return (value << bits) | (value >> (64 - bits))


cdef inline uint64_t random_next(uint64_t* state) noexcept nogil:
    """SplitMix64: the same numbers on every machine."""
    cdef uint64_t z
    state[0] += <uint64_t>0x9e3779b97f4a7c15
    z = state[0]
    z = (z ^ (z >> 30)) * <uint64_t>0xbf58476d1ce4e5b9
    z = (z ^ (z >> 27)) * <uint64_t>0x94d049bb133111eb
    return z ^ (z >> 31)


cdef inline uint32_t hashed(const uint64_t* secret, const uint8_t* key) noexcept nogil:
    """The upper half of SipHash-1-3 of a key of 16 bytes."""
    cdef uint64_t v0 = secret[0] ^ <uint64_t>0x736f6d6570736575
    cdef uint64_t v1 = secret[1] ^ <uint64_t>0x646f72616e646f6d
    cdef uint64_t v2 = secret[0] ^ <uint64_t>0x6c7967656e657261
    cdef uint64_t v3 = secret[1] ^ <uint64_t>0x7465646279746573
    cdef uint64_t[3] words
    cdef int i
    memcpy(words, key, KEY_SIZE)
    words[2] = <uint64_t>KEY_SIZE << 56
    for i in range(6):
        if i < 3:
            v3 ^= words[i]
        elif i == 3:
            v2 ^= 0xff
        v0 += v1
        v1 = rotated(v1, 13) ^ v0
        v0 = rotated(v0, 32)
        v2 += v3
        v3 = rotated(v3, 16) ^ v2
        v0 += v3
        v3 = rotated(v3, 21) ^ v0
        v2 += v1
        v1 = rotated(v1, 17) ^ v2
        v2 = rotated(v2, 32)
        if i < 3:
            v0 ^= words[i]
    return <uint32_t>((v0 ^ v1 ^ v2 ^ v3) >> 32)


cdef class Kernel:
    """A table of `keys` keys, and `requests` of them chosen at random, which run() goes through again and again."""

    cdef uint64_t[2] secret
    cdef Slot* slots
    cdef Entry* entries
    cdef uint8_t* requests
    cdef uint8_t[BATCH * REPLY] replies
    cdef uint32_t mask
    cdef uint32_t request_count
    cdef uint32_t position
    cdef size_t size
    cdef int shift

    def __cinit__(self, uint32_t keys, uint32_t requests):
        cdef uint64_t state = 1
        cdef uint32_t number, slot
        cdef int bits = 1
        if keys == 0 or requests == 0 or requests % BATCH:
            raise ValueError(f"keys must not be 0 and requests a multiple of {BATCH}, not {keys} and {requests}")
        while (<uint64_t>1 << bits) < 2 * <uint64_t>keys:
            bits += 1
        self.size = (sizeof(Slot) << bits) + (<size_t>keys + 1) * sizeof(Entry)
        self.mask = <uint32_t>((<uint64_t>1 << bits) - 1)
        self.shift = 32 - bits
        self.request_count = requests
        self.secret = [random_next(&state), random_next(&state)]
        self.requests = <uint8_t*>malloc(<size_t>requests * KEY_SIZE)
        self.slots = <Slot*>mmap(
            NULL, self.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0
        )
        if self.slots == <Slot*>MAP_FAILED:
            self.slots = NULL
        if self.slots == NULL or self.requests == NULL:
            raise MemoryError(f"no room for {keys} keys and {requests} requests")
        self.entries = <Entry*>(self.slots + (<uint64_t>1 << bits))
        for number in range(1, keys + 1):
            self.enter(number, random_next(&state), random_next(&state))
        for number in range(requests):
            slot = 1 + <uint32_t>(random_next(&state) % keys)
            memcpy(self.requests + <size_t>number * KEY_SIZE, self.entries[slot].key, KEY_SIZE)

    def __dealloc__(self):
        free(self.requests)
        if self.slots != NULL:
            munmap(self.slots, self.size)

    cdef void enter(self, uint32_t number, uint64_t first, uint64_t second) noexcept nogil:
        cdef Entry* entry = self.entries + number
        cdef uint32_t slot
        memcpy(entry.key, &first, 8)
        memcpy(entry.key + 8, &second, 8)
        entry.tag = hashed(self.secret, entry.key)
        slot = entry.tag >> self.shift
        while self.slots[slot].number:
            slot = (slot + 1) & self.mask
        self.slots[slot].tag = entry.tag
        self.slots[slot].number = number

    def run(self, uint32_t batches):
        """Looks up the next `batches` x 64 keys, and returns how many were found: all of them."""
        cdef uint32_t found = 0
        cdef uint32_t _batch
        for _batch in range(batches):
            found += self.run_batch(self.requests + <size_t>self.position * KEY_SIZE)
            self.position += BATCH
            if self.position == self.request_count:
                self.position = 0
        return found

    def prepare(self, uint32_t batches):
        """Reads the keys that run() will look up, as input that has just been received; returns their checksum."""
        cdef uint64_t total = 0, word
        cdef uint32_t position = self.position
        cdef uint32_t _request
        for _request in range(batches * BATCH):
            memcpy(&word, self.requests + <size_t>position * KEY_SIZE, 8)
            total += word
            position += 1
            if position == self.request_count:
                position = 0
        return total

    cdef uint32_t run_batch(self, const uint8_t* keys) noexcept nogil:
        cdef uint32_t[BATCH] tags
        cdef uint32_t slot, found = 0
        cdef Entry* entry
        cdef int i
        for i in range(BATCH):
            tags[i] = hashed(self.secret, keys + i * KEY_SIZE)
            prefetch(self.slots + (tags[i] >> self.shift))
        for i in range(BATCH):
            slot = tags[i] >> self.shift
            while self.slots[slot].number and self.slots[slot].tag != tags[i]:
                slot = (slot + 1) & self.mask
            prefetch(self.entries + self.slots[slot].number)
        for i in range(BATCH):
            slot = tags[i] >> self.shift
            while self.slots[slot].number:
                entry = self.entries + self.slots[slot].number
                if self.slots[slot].tag == tags[i] and memcmp(entry.key, keys + i * KEY_SIZE, KEY_SIZE) == 0:
                    entry.count += 1
                    entry.last = self.position
                    memcpy(self.replies + i * REPLY, &entry.count, REPLY)
                    found += 1
                    break
                slot = (slot + 1) & self.mask
        return found
