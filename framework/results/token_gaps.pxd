cimport cython


cdef class TokenGaps:
    cdef public object measured
    cdef object _outside, _counts

    cpdef add(self, long long gap_ns, count)
    @cython.locals(gap_ns="long long")
    cpdef add_each(self, gaps_ns, count)
