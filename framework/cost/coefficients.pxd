cdef class DecodeCost:
    cdef public object base, further, slope
    cdef tuple _envelope

    cpdef duration_ns(self, context_sum)
    cpdef bound(self, context_sum)
