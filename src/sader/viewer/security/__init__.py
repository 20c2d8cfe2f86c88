"""What protects the machine behind the server: access, sandbox, network proxy, paths of the data folder."""
