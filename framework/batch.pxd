cdef class Batch:
    cdef public list prefills, decodes, copies_out, copies_in
    cdef public Py_ssize_t decodes_at, prefill_tokens, decode_context, steps
    cdef public object inputs
    cdef public bint decodes_all

    cpdef list requests(self)
