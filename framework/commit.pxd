cimport cython

from schedlab.framework.batch cimport Batch
from schedlab.framework.decode_set cimport DecodeSet
from schedlab.framework.ledger cimport Ledger
from schedlab.framework.request cimport EngineRequest
from schedlab.framework.results.record cimport Recorder
from schedlab.framework.step cimport Decision


cdef class Commit:
    cdef public Ledger ledger
    cdef public Recorder recorder
    cdef public object columns, config, eos_token_ids, finish, leave, observe

    cpdef apply(self, Decision decision, Batch batch, result, now)
    @cython.locals(victim=EngineRequest, request=EngineRequest)
    cpdef move(self, Decision decision)
    @cython.locals(request=EngineRequest)
    cpdef turn_away(self, Decision decision, now)
    cdef _note_admission(self, EngineRequest request, Py_ssize_t start, now)
    @cython.locals(decode_set=DecodeSet, request=EngineRequest)
    cdef list _progress(self, Batch batch, result, now)
    cdef _advance_all(self, now)
    @cython.locals(decode_set=DecodeSet)
    cdef _advance_only(self, list decoded, now)
    @cython.locals(decode_set=DecodeSet)
    cpdef list gaps(self, long long now)
    @cython.locals(request=EngineRequest, start=Py_ssize_t, tokens=Py_ssize_t)
    cdef bint _compute(self, prefill, now) except -1
    cdef _emit(self, EngineRequest request, now)
    @cython.locals(request=EngineRequest)
    cdef list _ended_by_length(self, Batch batch, list ended)
