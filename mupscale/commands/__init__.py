"""One file per command of `python -m mupscale`: the only place that knows everybody."""
