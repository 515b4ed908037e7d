cimport cython


cdef class TokenGaps:
    cdef public dict measured
    cdef dict _outside, _counts

    cpdef add(self, long long gap_ns, count)
    @cython.locals(counts=dict, gap_ns=cython.longlong)
    cpdef add_each(self, gaps_ns, count)
