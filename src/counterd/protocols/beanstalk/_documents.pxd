# The documents with statistics, for the module with the sessions and that with the lists.

from libc.stdint cimport uint32_t

from counterd.protocols.beanstalk._store cimport BeanstalkStore

cdef bytes job_document(BeanstalkStore store, uint32_t number)
cdef bytes tube_document(BeanstalkStore store, uint32_t number, bint whole)
cdef bytes stats_document(BeanstalkStore store)
