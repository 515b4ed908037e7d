cimport cython

from schedlab.framework.request cimport EngineRequest


cdef class TraceRequest(EngineRequest):
    cdef public object after, also_after, think_ns, turn
    cdef public bint grows


cdef class Rows:
    cdef object _trace, _terms
    cdef dict _classes, _at
    cdef bint _plain

    @cython.locals(at=dict, request=TraceRequest)
    cpdef TraceRequest request(self, Py_ssize_t row, arrival_ns, EngineRequest past=*)
    @cython.locals(request=TraceRequest)
    cdef TraceRequest _full(self, Py_ssize_t row, arrival_ns, source_row, recorded, EngineRequest past)
    cdef _others(self, Py_ssize_t row)
    cpdef name(self, Py_ssize_t row)
    cdef _get(self, str name, Py_ssize_t row)
    cdef _slo(self, Py_ssize_t row, source_row)
    cdef _content(self, Py_ssize_t row, source_row, EngineRequest past)
    cdef _turn(self, Py_ssize_t row, EngineRequest past)
    cdef _history(self, EngineRequest past)


cdef class StreamSource:
    cdef object _parts, _terms
    cdef Py_ssize_t _row
    cdef list _arrival, _visible
    cdef Rows _rows

    cdef _advance(self)
    cpdef peek(self)
    @cython.locals(due=list, visible=list, row=Py_ssize_t)
    cpdef list pop(self, now_ns)
