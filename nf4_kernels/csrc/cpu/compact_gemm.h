/* The driver of GEMMs with weights in compact bfloat16, for those who compute single units. */
#pragma once

#include "compact.h"
#include "linear.h"

namespace nf4 {

using CompactGemm = GemmWith<CompactBf16>;

/* x in the order of compact_rows, and of m <= kDotRows rows of it from m0 on the results for a unit of rows, bias included.
 * compact_order() needs `scratch.order` until the last unit has been computed. */
void compact_order(const Kernels* kernels, Prepared& x, ThreadScratch& scratch);
void compact_unit(const CompactGemm& p, int64_t m0, int count, int64_t row0, int rows, ThreadScratch& scratch);

}  // namespace nf4
