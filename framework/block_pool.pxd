cdef class BlockPool:
    cdef public list free
    cdef public Py_ssize_t num_blocks
    cdef public object on_free

    cpdef list take(self, Py_ssize_t count, Py_ssize_t last=*)
    cpdef grow(self, tables)
    cpdef give_back(self, blocks)


cdef class HostPool:
    cdef public list free
    cdef public Py_ssize_t num_blocks
