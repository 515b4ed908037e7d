cimport cython

from schedlab.framework.ledger cimport Ledger
from schedlab.framework.prefix_cache cimport PrefixCache
from schedlab.framework.request cimport EngineRequest
from schedlab.framework.step cimport Decision


@cython.locals(request=EngineRequest, start=Py_ssize_t, count=Py_ssize_t, granted=Py_ssize_t)
cpdef check_step(Decision decision, Py_ssize_t budget, Ledger ledger)
