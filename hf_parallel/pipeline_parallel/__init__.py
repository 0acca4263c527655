"""Pipeline parallelism: cutting any model at its block boundaries and running the pieces on a schedule."""
