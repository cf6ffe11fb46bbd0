"""Lθ: where the answers of a language agent come from. Nothing here is imported until it is used."""
