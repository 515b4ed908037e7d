cimport cython

from schedlab.framework.results.digest cimport Digest, batch_text, pairs_text


cdef class DecisionRows:
    cdef public list rows
    cdef Digest _digest
    cdef str _batch
    cdef object _index, _now_ns, _repeat

    @cython.locals(batch=str, decode_only=cython.bint, refused=str, idle_s=str)
    cpdef add(self, index, now_ns, preempted, grants, decodes, decodes_at, refusals, idle_until_ns, starts, rejected)
    cpdef add_decodes(self, index, now_ns, repeat)
    cpdef complete(self)
    cpdef list take(self)
    cpdef str hexdigest(self)
    cdef _extend(self, str batch, index, now_ns, repeat)
