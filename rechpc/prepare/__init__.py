"""From any click log to a prepared data set (see rechpc.dataset): `python -m rechpc.prepare`.

`layout` finds the files, `sources` and `criteo` read them, `rows` types and judges every value, `features` fits and
maps, `shards` shuffles and writes, `convert` is how they work together. docs/data.md says what a user has to know.
"""
