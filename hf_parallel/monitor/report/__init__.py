"""What the records of all ranks say: metrics, slow ranks, a trace, a page; beside what was planned."""
