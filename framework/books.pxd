from schedlab.framework.decode_set cimport DecodeSet
from schedlab.framework.request cimport EngineRequest


cdef class Quote:
    cdef public Py_ssize_t start, hit, held, block_size

    cpdef Py_ssize_t blocks(self, Py_ssize_t tokens)
    cpdef Py_ssize_t most(self, Py_ssize_t free_blocks)


cdef class Books:
    cdef public Py_ssize_t block_size, watermark_blocks
    cdef public DecodeSet decode_set

    cpdef tuple views(self)
    cpdef tuple running_view(self)
    cpdef bint decodes(self, EngineRequest request)
    cpdef Quote quote(self, EngineRequest request)
    cpdef Py_ssize_t start_of(self, EngineRequest request)
    cpdef Py_ssize_t pending_blocks(self, EngineRequest request)
    cpdef take_changed(self)
    cpdef admit(self, EngineRequest request, Quote quote, Py_ssize_t tokens)
    cpdef extend(self, EngineRequest request, Quote quote, Py_ssize_t tokens)
    cpdef grow(self, requests)
    cpdef str withdraw(self, EngineRequest request)
    cpdef str preempt(self, EngineRequest request, str mode)
