"""Pipeline parallelism: cut a model into stages, order their work as data, run it over point-to-point messages."""
