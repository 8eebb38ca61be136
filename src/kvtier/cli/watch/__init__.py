"""`kvtier top` and `kvtier page`: what running engines do now, and did in the last hour."""
