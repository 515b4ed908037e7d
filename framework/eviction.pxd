cdef class CachedSpan:
    cdef public object key
    cdef public list blocks, owner_lengths
    cdef public Py_ssize_t num_unowned
