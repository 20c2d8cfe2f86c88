"""The local page and the OGC API of `sader serve`.

Requests, jobs and scenes. `worker` holds the processes that compute, `security` the protection of the machine.
"""
