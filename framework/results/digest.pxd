cimport cython


@cython.locals(victims=str, granted=str, decoded=str)
cpdef str batch_text(preempted, grants, decodes, decodes_at, rejected=*)
cpdef str pairs_text(pairs)


cdef class Digest:
    cdef object _hash, _repeat
    cdef str _batch

    cpdef add(self, str batch, repeat, bint decode_only)
    cpdef str hexdigest(self)
    cdef bytes _row(self)
