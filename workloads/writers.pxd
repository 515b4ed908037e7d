from schedlab.framework.request cimport EngineRequest


cpdef str encode_request(EngineRequest request)
cdef str _optional(EngineRequest request)


cdef class WorkloadWriter:
    cdef object _file
    cdef list _lines

    cpdef write(self, EngineRequest request)
    cpdef flush(self)
    cpdef close(self)
    cdef _pass_on(self)
