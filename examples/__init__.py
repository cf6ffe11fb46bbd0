"""Games from outside the package, one for each way to name them: see README.md."""
