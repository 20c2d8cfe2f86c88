"""Worker processes of the server: they open rasters, run the remover and draw pictures."""
