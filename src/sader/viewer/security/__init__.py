"""Protection of the machine: access control, sandbox of the worker processes, network proxy, data folder."""
