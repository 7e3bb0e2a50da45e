// up_to_200.cu for launches in which a warpgroup times its decoding.
#define NF4_TIMED true
#include "up_to_200.cu"
