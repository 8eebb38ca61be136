"""Lives of engines that share a root and end with SIGKILL, and an oracle that knows what must be
left of them."""
