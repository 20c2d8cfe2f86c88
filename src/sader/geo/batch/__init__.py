"""Many scenes: found in a catalogue, one task each on a dask cluster, with a report of the run."""
