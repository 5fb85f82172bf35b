# Assertions that exist in the debug build alone (COUNTERD_BUILD=debug).
#
# Floor 0. A failed check aborts the process with the condition and its place: after a broken invariant nothing the
# daemon could still say would be true, and a fuzzer sees an abort for what it is.

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
