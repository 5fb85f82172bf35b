# Loads the rules of a document.

from counterd.protocols.sentinel._rates cimport Rates


cdef bint rules_load(Rates* rates, rules) except -1
