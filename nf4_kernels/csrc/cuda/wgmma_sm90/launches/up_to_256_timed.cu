// up_to_256.cu for launches in which a warpgroup takes the times of its decoding.
#define NF4_TIMED true
#include "up_to_256.cu"
