"""What the screens of the app are made of, one part a file."""
