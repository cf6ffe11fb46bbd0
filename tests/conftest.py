"""For all tests: signals reach the processes that they start, even where a shell runs them as a background job."""

import signal

from hypothesis import settings

# Background jobs of a script ignore the one, nohup the other, and both are passed on.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("ours", deadline=None)  # no test depends on how fast the machine is
settings.load_profile("ours")
