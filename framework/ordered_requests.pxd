cdef class OrderedRequests:
    cdef list _keys
    cdef tuple _snapshot
    cdef public list requests

    cpdef tuple snapshot(self)
    cpdef add(self, Py_ssize_t key, request)
    cpdef remove(self, Py_ssize_t key)
