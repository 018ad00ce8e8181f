"""Files that `worker.py` loads by path: each has `build(shape)`. Those of peers import nothing of ours."""
