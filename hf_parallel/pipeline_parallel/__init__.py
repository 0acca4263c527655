"""Pipeline parallelism: cut any model into stages, put their work in order, and run it over ranks."""
