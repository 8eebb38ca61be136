"""What an operator can ask a running engine: metrics, a journal of decisions, a status socket."""
