"""Lives of a disk tier that end with SIGKILL, and an oracle that knows what must be left."""
