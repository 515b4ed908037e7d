cpdef str batch_text(preempted, grants, decodes, decodes_at, rejected=*)
cpdef str pairs_text(pairs)


cdef class Digest:
    cdef object _hash
    cdef str _batch
    cdef object _repeat

    cpdef add(self, str batch, repeat, bint decode_only)
    cdef bytes _row(self)
