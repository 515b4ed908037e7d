cimport cython

from schedlab.framework.batch cimport Batch
from schedlab.framework.chain cimport Chains
from schedlab.framework.commit cimport Commit
from schedlab.framework.decode_set cimport DecodeSet
from schedlab.framework.journal cimport Journal
from schedlab.framework.jump cimport Jump
from schedlab.framework.ledger cimport Ledger
from schedlab.framework.request cimport EngineRequest
from schedlab.framework.step cimport Decision, Step


cdef class Engine:
    cdef public object name, policy, executor, source, config, clock, recorder, predictor, columns, admission
    cdef public object standing_until, horizon_ns
    cdef public Ledger ledger
    cdef public Commit commit
    cdef public Journal journal
    cdef public object _idle_until_ns, _observe, _arrival_ns, _modelled_us
    cdef public dict _requests, _served, _demanded
    cdef public list _aborts, _abort_ids
    cdef public Py_ssize_t _boundaries, _next_audit
    cdef public bint _awaits_release
    cdef Chains _chains
    cdef Jump _jump

    cpdef bint step(self, horizon_ns=*) except -1
    cpdef submit(self, EngineRequest request)
    cdef _take_arrivals(self, now)
    cpdef note_last_arrival(self)
    cdef _next_arrival(self)
    cdef bint _await_arrival(self) except -1
    cdef _take_aborts(self, now)
    cdef Py_ssize_t _audit_spacing(self) except -1
    cdef _withdraw(self, EngineRequest request, now, reason=*)
    cpdef next_event_ns(self)
    cdef bint _may_leave(self, tuple leaving) except -1
    cpdef wakes_ns(self)
    cdef _continue(self, now)
    cdef _ask(self, now)
    cdef _schedule(self, Step step)
    cdef _check(self, Decision decision)
    cdef _check_wakes(self, until_ns, now_ns)
    cdef _await_release(self, Decision decision)
    cdef _check_held(self, Decision decision)
    cdef str _head_lacks(self, Decision decision)
    cpdef _stop_ns(self, now)
    cdef _fast_forward(self, Jump jump, now, Decision decision)
    cpdef _execute(self, Decision decision, scheduler_us, Py_ssize_t steps)
    cdef _idle(self, Decision decision)
    cdef _pass_time(self, until_ns)
    @cython.locals(ledger=Ledger, decode_set=DecodeSet, request=EngineRequest, decodes=list)
    cdef Batch _batch(self, Decision decision, Py_ssize_t steps=*)
    cdef _fill_inputs(self, Decision decision, Batch batch, columns)
    cpdef finish(self, EngineRequest request, state, now)
    cpdef _leave(self, EngineRequest request, state, now)
    cdef _record_end(self, EngineRequest request, state, now)
