"""`kvtier doctor` finds out what is wrong with a machine, its tiers, or a running engine;
`kvtier bench` times tiers alone."""
