"""Worker processes: they open rasters and run the model, so that a crash or a lack of memory ends no server."""
