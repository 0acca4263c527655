"""CUDA devices whose memory is host memory, on a build of torch without CUDA: kernels, streams and transfers of a GPU, no GPU."""
