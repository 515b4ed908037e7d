cimport cython

from schedlab.framework.decode_set cimport DecodeSet
from schedlab.framework.ledger cimport Ledger
from schedlab.framework.prefix_cache cimport PrefixCache


cdef class Chains:
    cdef Ledger _ledger
    cdef Py_ssize_t _most

    cpdef Py_ssize_t limit(self)
    @cython.locals(decode_set=DecodeSet, cache=PrefixCache, limit=Py_ssize_t, steps=Py_ssize_t, ahead=Py_ssize_t, needing=dict)
    cpdef Py_ssize_t take(self)
