cdef class VirtualClock:
    cdef public long long _now

    cpdef now(self)
    cpdef boundary(self)
    cpdef start(self)
    cpdef stop(self, modelled_ns)
    cpdef idle_until(self, t_ns)
