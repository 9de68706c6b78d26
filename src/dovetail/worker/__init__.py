"""A worker process: one device, every model instance on it, one iteration at a time. The one place where engine and
store meet. `python -m dovetail.worker` starts one."""
