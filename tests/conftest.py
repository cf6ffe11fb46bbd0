"""For all tests: Ctrl-C reaches the processes that they start, also where a shell runs the tests in the background."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a script ignore it, and pass that on
