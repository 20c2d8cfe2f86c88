"""The local page and the OGC API of `sader serve`.

Requests, jobs and scenes. Computation happens in the processes of `worker`; what protects the machine is in `security`.
"""
