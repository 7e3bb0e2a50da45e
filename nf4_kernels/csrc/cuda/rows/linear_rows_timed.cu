// linear_rows.cu for launches in which one warp times its decoding: its C entry is nf4_cuda_linear_rows_timed.
#define NF4_TIMED true
#define NF4_LINEAR_ROWS nf4_cuda_linear_rows_timed
#include "linear_rows.cu"
