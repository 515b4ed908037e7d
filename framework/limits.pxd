cimport cython

from schedlab.framework.request cimport EngineRequest


@cython.locals(prompt=Py_ssize_t)
cpdef never_fits(EngineRequest request, config)
@cython.locals(wanted=Py_ssize_t)
cpdef set_limits(EngineRequest request, config)
cpdef ending(EngineRequest request, config)
cdef _wanted_output(EngineRequest request)
@cython.locals(prompt=Py_ssize_t)
cpdef tokens_served(EngineRequest request)
