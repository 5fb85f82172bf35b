# Assertions of the debug build (COUNTERD_BUILD=debug).
#
# Floor 0. A failed check prints its place and aborts the process, because after a broken invariant no reply can be
# trusted. A fuzzer recognises the abort.

cdef extern from *:
    """
    #ifdef COUNTERD_DEBUG
    #include <stdio.h>
    #include <stdlib.h>
    #define COUNTERD_DEBUG_BUILD 1
    #define debug_check(condition) do { if (!(condition)) { \\
        fprintf(stderr, "%s:%d: %s: check failed\\n", __FILE__, __LINE__, __func__); abort(); } } while (0)
    #else
    #define COUNTERD_DEBUG_BUILD 0
    #define debug_check(condition) ((void)0)
    #endif
    """
    void debug_check(bint condition) noexcept nogil
    int COUNTERD_DEBUG_BUILD
