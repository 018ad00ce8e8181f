"""The commands of `modepth`, a module each: `add` declares a command, `run` does it."""
