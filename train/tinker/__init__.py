"""Training at a service that speaks Tinker's protocol.

`weights.py` is what the loop asks, and `service.py` alone knows the SDK.
"""
