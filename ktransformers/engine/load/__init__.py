"""Building an engine: opened -> planned -> loaded -> arranged -> captured; and the process of a rank that follows.

`builder.py` is the one way from an opened model to a loaded one; a `CachePlan` says how many sequences
share its pages. Nothing that a caller hands in is changed: what is resolved is in the engine's own `config`.
`loaded.py` is what comes of it. `graphs.py` has steps captured and kernels compiled before the first request, for which
`warmup.py` calls every kind of step; `reference.py` is plain transformers behind the same loop; `worker.py` is the
process of another rank.

How weights get in: `optimize/apply.py` lets every operator load its own, one after the other, while
`weights/read_ahead.py` asks the system for the bytes of the next ones. Experts are packed a projection at a time in one
job of the pool: each thread reads some tiles from the file into memory that its cache holds (not through the map, whose
pages would have to be entered and taken out again) and writes a run of memory of its own, because threads that write to
a huge page which is not there yet would each clear one. So nothing is in memory twice. What goes to a GPU is read the
same way into pinned memory, a piece while the one before it is copied. Files stay in the system's cache, so that the
next start does not wait for the disk, unless RAM cannot hold them beside the weights: then what was loaded leaves it.
"""
