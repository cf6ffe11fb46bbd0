"""Where the answers of a language agent come from (Lθ of the paper). Nothing here is imported until it is used."""
