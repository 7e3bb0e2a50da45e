// linear_wgmma.cu for launches in which a warpgroup takes the times of its decoding: its C entry is
// nf4_cuda_linear_wgmma_timed.
#define NF4_TIMED true
#define NF4_LINEAR_WGMMA nf4_cuda_linear_wgmma_timed
#include "linear_wgmma.cu"
