cimport cython

from schedlab.framework.ordered_requests cimport OrderedRequests
from schedlab.framework.request cimport DecodeClock, EngineRequest


cdef class DecodeSet(DecodeClock):
    cdef public Py_ssize_t block_size, total_base, version
    cdef public OrderedRequests ordered
    cdef public list members, buckets
    cdef public dict last_emitted_overrides
    cdef public long long emitted_ns
    cdef list _finishes

    cpdef join(self, EngineRequest request)
    cpdef leave(self, EngineRequest request)
    cpdef advance(self, long long now_ns)
    @cython.locals(request=EngineRequest)
    cpdef advance_only(self, list decoded, long long now_ns)
    cpdef dict needing_block(self)
    @cython.locals(entry=tuple, tick=Py_ssize_t, request=EngineRequest)
    cpdef next_finish(self)
    cpdef list take_finished(self)
    cdef _place(self, EngineRequest request)


cpdef _by_admission(EngineRequest request)
