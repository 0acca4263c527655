"""The ranks of a job: axes and their process groups, the links that join ranks, and messages before the groups exist."""
