"""One file per command of `python -m mupscale`. Only this package imports all others."""
