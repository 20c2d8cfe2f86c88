"""Worker processes that open rasters and run the model: a crash or a lack of memory does not end the server."""
