"""The screens of the app, one a file: the first one, the choice of a game, the game, the list of a record, a run."""
