"""Models on NVIDIA GPUs: elastic memory by CUDA's virtual memory calls, Triton kernels, graphs of decode iterations."""
