cimport cython

from schedlab.framework.books cimport Books, Quote
from schedlab.framework.decode_set cimport DecodeSet
from schedlab.framework.request cimport EngineRequest


cdef class Decision:
    cdef public object now_ns, idle_until_ns, hold_until_ns
    cdef public list prefills, decodes, preempted, refusals, rejected
    cdef public dict admitted
    cdef public Py_ssize_t decodes_at
    cdef public bint decodes_all


cdef class Step:
    cdef public Books _books
    cdef public Decision _decision
    cdef DecodeSet _decode_set
    cdef object _policy, _waiting, _prefilling, _decoding
    cdef tuple _running, _changed
    cdef public Py_ssize_t _index, _budget
    cdef bint _open, _closed
    cdef EngineRequest _quoted
    cdef Quote _quote

    cpdef cached_tokens(self, request)
    cpdef pending_tokens(self, request)
    cpdef blocks_needed(self, request, Py_ssize_t tokens)
    @cython.locals(req=EngineRequest, books=Books, quote=Quote, free=Py_ssize_t)
    cpdef fits(self, request)
    @cython.locals(req=EngineRequest, decode_set=DecodeSet, decision=Decision, index=Py_ssize_t)
    cpdef grant(self, request, max_tokens=*)
    @cython.locals(decode_set=DecodeSet, decision=Decision, members=list, needing=dict)
    cpdef grant_decodes(self, requests=*)
    @cython.locals(req=EngineRequest, books=Books)
    cpdef preempt(self, request, mode=*)
    @cython.locals(req=EngineRequest)
    cpdef reject(self, request, reason=*)
    cpdef Decision close(self)
    @cython.locals(books=Books, quote=Quote, tokens=Py_ssize_t, spare=Py_ssize_t, admission=bint)
    cdef _grant_prefill(self, EngineRequest req, max_tokens)
    cdef Quote _quote_for(self, EngineRequest req)
    cdef _record(self, EngineRequest req, Py_ssize_t start, Py_ssize_t tokens)
    cdef bint _give_block(self, EngineRequest req) except -1
    cdef _take_back(self, EngineRequest req)
    @cython.locals(request=EngineRequest)
    cdef _freeze(self)
    cdef bint _granted_in_bulk(self, EngineRequest req)
    cdef _decoding_only(self, request)
    cdef _refused(self, EngineRequest req, grant)
    cdef _refuse_again(self, EngineRequest req)
    cdef _is_over(self, name)


cdef EngineRequest _own(request)
