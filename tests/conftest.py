"""For all tests: signals reach the processes that they start, even where a shell runs them as a background job."""

import signal

# Background jobs of a script ignore the one, nohup the other, and both are passed on.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
