"""For all tests: Ctrl-C reaches the processes that they start, even where a shell runs them in the background."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a script ignore it, and pass that on
