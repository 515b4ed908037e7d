cimport cython

from schedlab.framework.batch cimport Batch
from schedlab.framework.ledger cimport Ledger
from schedlab.framework.request cimport EngineRequest
from schedlab.framework.results.record cimport Recorder
from schedlab.framework.step cimport Decision


cdef class Stretch:
    cdef public object bound, free_block_ns
    cdef public list first_gaps, gaps
    cdef public long long begin_ns, end_ns, second_ns
    cdef public Py_ssize_t context, decodes, followers, free, free_min, steps, unowned

    cpdef extend(self, duration_ns, Py_ssize_t free)
    cpdef follow(self, Py_ssize_t steps)


cdef class Journal:
    cdef public Recorder recorder
    cdef public Py_ssize_t num_steps
    cdef Ledger _ledger
    cdef object _modelled_us

    @cython.locals(ledger=Ledger, context=Py_ssize_t, decodes=Py_ssize_t, start=Py_ssize_t, count=Py_ssize_t)
    cpdef step(self, Decision decision, Batch batch, result, duration_ns, scheduler_us)
    @cython.locals(ledger=Ledger, recorder=Recorder, steps=Py_ssize_t, n=Py_ssize_t, left=Py_ssize_t)
    cpdef stretch(self, Decision decision, Stretch stretch)
    @cython.locals(request=EngineRequest, victim=EngineRequest)
    cdef _decision(self, Decision decision, Py_ssize_t steps=*)
