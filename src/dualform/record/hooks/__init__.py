"""How the recorder attaches to objects of the user: hooks that copy to nothing, wrapped methods, interrupts."""
