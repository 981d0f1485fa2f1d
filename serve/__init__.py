"""HTTP in, bytes out, and the life of the other processes."""
